"""Find the form of a row by its columns, bring it into a form that is trained on, and refuse columns that are not read.

Rows are trained on in the forms OWN; `forms.FORMS` are read as messages. A row of an own form stays as it is, whatever
other columns it has.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.files.kinds import kind_of
from isoloss.engine.data.files.values import without_nulls
from isoloss.engine.data.forms import COLUMNS, FORMS, Form, with_functions
from isoloss.engine.data.rows import Row, UnreadRow, listed
from isoloss.engine.data.system_message import with_system
from isoloss.engine.data.tool_roles import TOOL_ROLES, with_tool_roles
from isoloss.parallel.runtime.errors import UserError

OWN = (("messages",), ("prompt", "completion"), ("text",))
OWN_TEXT = "`messages`, or `prompt` and `completion`, or `text`"
PROMPTS = (("prompt",), ("messages",))  # of reinforcement learning; the first of them is read
TEXT_PROMPT = "prompt as text"
EMPTY = (None, "", [], {})
WITH_CALLS = " with tool_call"  # what the name of a form ends with where messages have ms-swift's roles
# What data.columns may name.
NAMED = {"messages", "prompt", "completion", "text", "answer", "system", "tools", "functions", "data_source"} | COLUMNS
NO_PREFERENCES = "isoloss has no training on preferences yet: take the column out"
# Columns of other kinds of data, by their remedy. Ignoring one would train the model on something else than meant.
REFUSED = {
    "isoloss trains on text alone: take the column out, or the row": (
        "image", "images", "image_url", "image_path", "video", "videos", "audio", "audios",
    ),
    "name it by data.columns={system: ...}": ("system_prompt", "developer_prompt"),
    "put it into the message that it belongs to, or name all columns to read by data.columns": (
        "history", "documents", "instruction", "input", "query",
    ),
    "give data.template_kwargs, for all rows": ("chat_template_kwargs", "template_kwargs", "enable_thinking"),
    "give it as `tools`": ("functions", "function_call", "available_tools"),
    NO_PREFERENCES: (
        "chosen", "rejected", "rejected_response", "preferred_output", "non_preferred_output", "kto_tag",
    ),
    "set `weight` of a message to 0 instead": ("weight", "weights", "loss_mask", "loss", "train", "sample_weight"),
}  # fmt: skip
WHY_NOT = {name: cure for cure, names in REFUSED.items() for name in names}


def read_row(unread: UnreadRow, data: DataConfig, prompts: bool = False) -> Row:
    """Parse a row and bring it into a form that is trained on. prompts: as `recognised` says. Raises UserError."""
    kind = kind_of(unread.path)
    values = unread.parse(unread.place)
    return recognised(values, unread.place, data, prompts, nulls=kind is None or not kind.in_columns)


def recognised(
    values: Mapping[str, Any], place: str, data: DataConfig, prompts: bool = False, nulls: bool = True
) -> Row:
    """Return a row in one of the forms OWN, or, for reinforcement learning, with one of the columns PROMPTS.

    values: the row's values by column, as its file has them.
    prompts: whether it is a prompt of reinforcement learning. It keeps the columns that are made into `prompt`, as
        reward functions may read them.
    nulls: whether a field that is null was written by the user; else Arrow wrote it, for a field of another row.
    Raises UserError for a row of no form or several, or with columns that would not be read.
    """
    named = {ours: column(values, theirs, place) for ours, theirs in data.columns.items()}
    named = {ours: value if nulls else without_nulls(value) for ours, value in named.items()}
    given = {name: value for name, value in {**values, **named}.items() if value is not None}
    seen = {name: given[name] for name in named if name in given} if named else given
    refuse_preferences(seen, place, prompts)
    form = other_form(seen, place, prompts)
    sources = {theirs if theirs in values else theirs.partition(".")[0] for theirs in data.columns.values()}
    read = set() if prompts else sources - named.keys()
    formed = {"prompt"} if prompts else {*COLUMNS, *(name for own in OWN for name in own)}
    aside = [name for name in given if named and name in formed - read and name not in named]
    if form is not None and not prompts:
        read |= {*form.columns, *form.more}
    values = {name: value for name, value in given.items() if name not in read.union(aside)}
    if form is not None:
        made = form.make({name: seen[name] for name in form.read(prompts) if name in seen}, place)
        values["prompt" if prompts else "messages"] = made
    took = COLUMNS if named else form.read(prompts) if form else ()
    key = messages_column(values, prompts)
    values = with_functions(values, key, place)
    values, calls = with_tool_roles(values, key, place)
    values, keeps = with_system(values, key, place, data.system)
    check_columns(values, place, took)
    name = (form.name if form else own_name(values, place, prompts)) + WITH_CALLS * calls
    return Row(place, values, name, tuple(took), tuple(aside), keeps)


def messages_column(values: Mapping[str, Any], prompts: bool) -> str | None:
    """Return the column that a system message belongs to; None if the row has none."""
    if prompts:
        return next((name for (name,) in PROMPTS if name in values), None)
    forms = forms_in(values)
    return forms[0][0] if forms else None


def column(values: Mapping[str, Any], name: str, place: str) -> Any:
    """Return the value of a column, or of a field of a column ("reward_model.ground_truth"). Raises UserError."""
    found: Any = values
    for part in (name,) if name in values else name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise UserError(
                f"{place}: no column `{name}`, which data.columns names (keys: {listed(sorted(values)) or 'none'}): "
                "correct data.columns"
            )
        found = found[part]
    return found


def other_form(seen: Mapping[str, Any], place: str, prompts: bool) -> Form | None:
    """Return the form of `forms.FORMS` that a row has; None if it has an own one, or none. Raises UserError."""
    own = PROMPTS if prompts else OWN
    if any(all(name in seen for name in form) for form in own):
        return None
    fits = [form for form in FORMS if all(name in seen for name in form.needed(prompts))]
    if len(fits) > 1:
        several = " and ".join(f"{form.name} (`{'` + `'.join(form.needed(prompts))}`)" for form in fits)
        raise UserError(
            f"{place}: a row has one form, and this one has {several}: name the columns to read by data.columns, as in "
            f"data.columns={{{fits[0].columns[0]}: {fits[0].columns[0]}, ...}}"
        )
    for name in fits[0].hidden if fits else ():
        if seen.get(name) not in EMPTY:
            raise UserError(
                f"{place}: `{name}` would not be seen by the model, in a row of {fits[0].name}: put it into the "
                "question, or name the columns to read by data.columns"
            )
    return fits[0] if fits else None


def refuse_preferences(seen: Mapping[str, Any], place: str, prompts: bool) -> None:
    """Raise UserError for rows of TRL's unpaired preference and stepwise supervision, which two columns show."""
    label = seen.get("label")
    good_or_bad = isinstance(label, bool) or (isinstance(label, str) and label.lower() in ("true", "false"))
    if good_or_bad and ("completion" in seen or (not prompts and "messages" in seen)):
        raise UserError(
            f"{place}: `label` says whether the answer is a good one (unpaired preference): {NO_PREFERENCES}"
        )
    if isinstance(seen.get("completions"), list) and isinstance(seen.get("labels"), list):
        raise UserError(
            f"{place}: `completions` and `labels` are steps and whether each is right (stepwise supervision): isoloss "
            "has no training on steps yet: take the columns out"
        )


def own_name(values: Mapping[str, Any], place: str, prompts: bool) -> str:
    """Return the name of an own form, for the banner. Raises UserError if the row has none or several."""
    if not prompts:
        return " + ".join(form_of(values, place))
    name = next((name for (name,) in PROMPTS if name in values), "")
    return TEXT_PROMPT if isinstance(values.get(name), str) else name


def form_of(values: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """Return the columns that a row of SFT is read from, one of OWN.

    Raises UserError if the row has none or several of the forms, or a column of REFUSED.
    """
    check_columns(values, place)
    forms = forms_in(values)
    if len(forms) > 1:
        several = " and ".join("`" + "` + `".join(form) + "`" for form in forms)
        raise UserError(f"{place}: a row has one form, and this one has {several}: take out what is not to be learned")
    if not forms:
        keys = listed(sorted(values)) or "none"
        rl = "; a `prompt` alone is for reinforcement learning" if "prompt" in values else "; or give data.columns"
        raise UserError(
            f"{place}: unknown kind of row (keys: {keys}): a row has {OWN_TEXT}, or a form of docs/data.md{rl}"
        )
    return forms[0]


def check_columns(values: Mapping[str, Any], place: str, took: Collection[str] = ()) -> None:
    """Raise UserError for a column of REFUSED that is not empty, and not one of those that were read."""
    for name, value in values.items():
        cure = WHY_NOT.get(name.lower())
        if cure and name not in took and value not in EMPTY:
            raise UserError(f"{place}: `{name}` would not be seen by the model: {cure}")


def check_mapping(data: DataConfig) -> None:
    """Raise UserError for an entry of data.columns that names nothing."""
    for ours, theirs in data.columns.items():
        if ours not in NAMED:
            raise UserError(f"data.columns.{ours}: not a column that isoloss reads: {', '.join(sorted(NAMED))}")
        if not isinstance(theirs, str) or not theirs:
            raise UserError(f"data.columns.{ours}={theirs!r} must be the name of a column in the files")


def unused(values: Mapping[str, Any]) -> list[str]:
    """Return the columns that the model does not see, such as an id."""
    (form,) = forms_in(values)
    return [name for name in values if name not in (*form, "tools")]


def forms_in(values: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return every form of OWN whose columns the row has."""
    return [form for form in OWN if all(name in values for name in form)]


def mapping_lines(key: str, forms: Iterable[str], data: DataConfig, prompts: bool = False) -> list[str]:
    """Return lines about how the rows of `key` are read, if they are of other forms than isoloss's own, or mapped.

    forms: names of the forms of its rows.
    """
    full = list(forms)
    names = [name.removesuffix(WITH_CALLS) for name in full]
    lines = [f"{key}: {form.line(prompts)}" for form in FORMS if form.name in names]
    lines += [f"{key}: messages{WITH_CALLS}: {TOOL_ROLES}"] if names != full else []
    if data.columns:
        mapped = ", ".join(f"{theirs} -> {ours}" for ours, theirs in data.columns.items())
        plain = "; prompts that are text get no chat template" if TEXT_PROMPT in names else ""
        lines.insert(0, f"{key}: data.columns: {mapped}{plain}")
    return lines
