"""Name the columns that other trainers read as data.columns does, for the tables of keys."""

from typing import Any

from isoloss.tools.migrate.settings import UNSET, Settings


def slime_columns(s: Settings) -> Any:
    """Return data.columns. A configuration that names no rows has none: a function of the user's makes them."""
    if not s.has("--prompt-data", "--input-key", "--label-key", "--tool-key"):
        return UNSET
    fine_tunes = s.equals("--loss-type", "sft_loss")
    found = {"messages" if fine_tunes else "prompt": s.text("--input-key")}
    if s.has("--label-key") and not fine_tunes:
        found["answer"] = s.text("--label-key")
    if not s.equals("--tool-key", "tools"):  # a column that is named must be in every row
        found["tools"] = s.text("--tool-key")
    return s.columns(**found)


def other_in_eval(s: Settings, key: str) -> bool:
    """Return whether a key of the evaluation names another column than that of training."""
    return s(key) != s(key.replace("--eval-", "--"))


def prompt_column(s: Settings) -> Any:
    """Return data.columns. The key is open-r1's, whose prompts are text that becomes a turn of the user: `question`."""
    return s.columns(question=s.text("dataset_prompt_column")) if s.has("dataset_prompt_column") else UNSET


def text_column(s: Settings) -> Any:
    """Return data.columns of rows of text. Rows of messages are found by their names, whatever the key says."""
    field = s.text("dataset_text_field")
    return UNSET if field == "messages" else s.columns(text=field)


def verl_rl_columns(s: Settings) -> Any:
    """Return data.columns. The answer is found by verl's own name."""
    source = s.text("data.reward_fn_key")
    named_source = {} if source == "data_source" else {"data_source": source}
    return s.columns(prompt=s.text("data.prompt_key"), **named_source)


def verl_sft_columns(s: Settings) -> Any:
    """Return data.columns. Releases with prompt_key and response_key train on an answer to a question, which may be
    fields of columns; without a name these are those of verl's own configuration."""
    answers = any(s.named(f"data.{name}") for name in ("prompt_key", "response_key"))
    if answers and not s.on("data.multiturn.enable"):
        return s.columns(question=field(s, "prompt", "question"), answer=field(s, "response", "answer"))
    messages, tools = (
        s.named(f"data.{name}_key") or s.named(f"data.multiturn.{name}_key") or name for name in ("messages", "tools")
    )
    named_tools = {} if tools == "tools" else {"tools": tools}  # a column that is named must be in every row
    return s.columns(messages=messages, **named_tools)


def field(s: Settings, name: str, default: str) -> str:
    """Return a column, or a field of one, as data.columns names it."""
    inner = s.texts(f"data.{name}_dict_keys") if s.has(f"data.{name}_dict_keys") else []
    return ".".join([str(s.named(f"data.{name}_key") or default), *inner])
