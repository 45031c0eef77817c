"""The columns of a row: which form it has, and which columns are not for training on text."""

from collections.abc import Mapping
from typing import Any

from isoloss.engine.data.rows import listed
from isoloss.parallel.runtime.errors import UserError

FORMS = (("messages",), ("prompt", "completion"), ("text",))
FORMS_TOLD = "`messages`, or `prompt` and `completion`, or `text`"
# Columns of other kinds of data, of which none may be passed over: the model would learn something else.
REFUSED = {
    "isoloss trains on text alone: take the column out, or the row": (
        "image", "images", "image_url", "image_path", "video", "videos", "audio", "audios",
    ),
    "give it as the first message, {role: system}": ("system", "system_prompt", "developer_prompt"),
    "put it into the message that it belongs to": ("history", "documents", "instruction", "input", "query"),
    "give data.template_kwargs, for all rows": ("chat_template_kwargs", "template_kwargs", "enable_thinking"),
    "give it as `tools`": ("functions", "function_call", "available_tools"),
    "isoloss has no training on preferences yet: take the column out": ("chosen", "rejected", "rejected_response"),
    "set `weight` of a message to 0 instead": ("weight", "weights", "loss_mask", "loss", "train", "sample_weight"),
}  # fmt: skip
WHY_NOT = {name: cure for cure, names in REFUSED.items() for name in names}


def form_of(values: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """The columns that a row of SFT is read from. UserError where that is not one of FORMS, or another column could
    change what is learned."""
    check_columns(values, place)
    forms = forms_in(values)
    if len(forms) > 1:
        several = " and ".join("`" + "` + `".join(form) + "`" for form in forms)
        raise UserError(f"{place}: a row has one form, and this one has {several}: take out what is not to be learned")
    if not forms:
        keys = listed(sorted(values)) or "none"
        raise UserError(f"{place}: unknown kind of row (keys: {keys}): a row has {FORMS_TOLD}")
    return forms[0]


def check_columns(values: Mapping[str, Any], place: str) -> None:
    """UserError for a column that has something in it, and would be passed over."""
    for name, value in values.items():
        cure = WHY_NOT.get(name.lower())
        if cure and value not in (None, "", [], {}):
            raise UserError(f"{place}: `{name}` would not be seen by the model: {cure}")


def unused(values: Mapping[str, Any]) -> list[str]:
    """Columns of a row that say nothing to the model, such as an id."""
    (form,) = forms_in(values)
    return [name for name in values if name not in (*form, "tools")]


def forms_in(values: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [form for form in FORMS if all(name in values for name in form)]
