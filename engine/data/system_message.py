"""Give rows the system message of their column `system`, or that of data.system."""

from typing import Any

from isoloss.engine.data.rows import shown
from isoloss.parallel.runtime.errors import UserError

SYSTEM_ROLES = ("system", "developer")


def with_system(
    values: dict[str, Any], key: str | None, place: str, for_all: str | None
) -> tuple[dict[str, Any], bool]:
    """Return a row's values with a system message, and whether the row keeps one of its own in place of data.system.

    key: the column of the messages; None if the row has none.
    for_all: data.system. A row's own message, or its column `system`, comes before it.
    Raises UserError for a row with a column `system` and a system message, and for one that is plain text.
    """
    own = values.get("system") or None
    others = {name: value for name, value in values.items() if name != "system"}
    if key is None or (own is None and for_all is None):
        return others if own is None else values, False
    if not isinstance(own, str | None):
        raise UserError(f"{place}: `system` must be text, not {shown(own)}: write it as text, or drop the row")
    messages = values[key]
    if isinstance(messages, str) and isinstance(values.get("completion"), list):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        raise UserError(
            f"{place}: {'data.system' if own is None else '`system`'} reaches the model through the chat template, and "
            f"`{key}` is not messages but {shown(messages)}: give messages, or name the text as a question, as in "
            f"data.columns={{question: {key}}}"
        )
    if not any(isinstance(message, dict) and message.get("role") in SYSTEM_ROLES for message in messages):
        message = {"role": "system", "content": for_all if own is None else own}
        return {**others, key: [message, *messages]}, own is not None and for_all is not None
    if own is not None:
        raise UserError(f"{place}: the row has a column `system` and a system message in `{key}`: keep one of them")
    return others, True
