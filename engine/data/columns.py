"""Find the form of a row by its columns, and refuse columns that training on text cannot use."""

from collections.abc import Mapping
from typing import Any

from isoloss.engine.data.rows import listed
from isoloss.parallel.runtime.errors import UserError

FORMS = (("messages",), ("prompt", "completion"), ("text",))
FORMS_TEXT = "`messages`, or `prompt` and `completion`, or `text`"
# Columns of other kinds of data, by their remedy. Ignoring one would train the model on something else than meant.
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
    """Return the columns that a row of SFT is read from, one of FORMS.

    Raises UserError if the row has none or several of the forms, or a column of REFUSED.
    """
    check_columns(values, place)
    forms = forms_in(values)
    if len(forms) > 1:
        several = " and ".join("`" + "` + `".join(form) + "`" for form in forms)
        raise UserError(f"{place}: a row has one form, and this one has {several}: take out what is not to be learned")
    if not forms:
        keys = listed(sorted(values)) or "none"
        raise UserError(f"{place}: unknown kind of row (keys: {keys}): a row has {FORMS_TEXT}")
    return forms[0]


def check_columns(values: Mapping[str, Any], place: str) -> None:
    """Raise UserError for a column of REFUSED that is not empty."""
    for name, value in values.items():
        cure = WHY_NOT.get(name.lower())
        if cure and value not in (None, "", [], {}):
            raise UserError(f"{place}: `{name}` would not be seen by the model: {cure}")


def unused(values: Mapping[str, Any]) -> list[str]:
    """Return the columns that the model does not see, such as an id."""
    (form,) = forms_in(values)
    return [name for name in values if name not in (*form, "tools")]


def forms_in(values: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return every form of FORMS whose columns the row has."""
    return [form for form in FORMS if all(name in values for name in form)]
