"""Read prompts from rows of files.

A row has `prompt`, text or messages, or `messages`; `columns` makes a `prompt` of the columns of other forms, and
`to_prompt` names the columns that are not the prompt. Messages are rendered with the chat template, up to the start of
the assistant's turn; text is encoded as it is.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.bad_rows import Reject, Rejects
from isoloss.engine.data.chat import encode
from isoloss.engine.data.chat_template import (
    NOTHING,
    Template,
    as_the_template_reads,
    check_template_kwargs,
    check_tools,
    refuse_tools,
    render,
)
from isoloss.engine.data.columns import check_columns, read_row
from isoloss.engine.data.dataset import nothing_left
from isoloss.engine.data.files.sources import files_and_sources
from isoloss.engine.data.messages import check_messages
from isoloss.engine.data.mixture import Mixture, mixture_of, order_of
from isoloss.engine.data.remarks import digest
from isoloss.engine.data.rows import Row, count_rows, listed, shown, unread_rows
from isoloss.engine.data.turn_ends import turn_ends
from isoloss.engine.rl.trajectory import Prompt
from isoloss.models.weights.side_files import declared_stops
from isoloss.parallel.runtime import environment
from isoloss.parallel.runtime.console import Progress
from isoloss.parallel.runtime.errors import UserError

PROMPT_KEYS = ("prompt", "messages")
# In order of precedence; the dotted name is verl's, `solution` TRL's, `label` slime's.
ANSWER_KEYS = ("answer", "ground_truth", "reward_model.ground_truth", "solution", "label")


@dataclass(frozen=True)
class PromptSet:
    """The prompts of some files. dropped: number of rows left out for their length. repeated: number of rows left out
    because an earlier one is alike. rejects: bad rows that were left out. forms: rows by the name of their form.
    keep_system: number of rows that keep their system message in place of data.system. mixture: the sources that
    batches draw prompts from by weights; None without weights."""

    prompts: tuple[Prompt, ...]
    dropped: int = 0
    repeated: int = 0
    rejects: tuple[Reject, ...] = ()
    forms: Mapping[str, int] = field(default_factory=dict)
    keep_system: int = 0
    mixture: Mixture | None = None

    @property
    def order(self) -> int | Mixture:
        """Return what `draw_indices` draws from."""
        return order_of(len(self.prompts), self.mixture)

    def digests(self) -> Iterator[bytes]:
        """Return a digest of the tokens of each prompt."""
        return (digest(np.array(prompt.tokens, np.int32)) for prompt in self.prompts)

    @property
    def fingerprint(self) -> str:
        """Hash all that completions and rewards can depend on: ids (which seed completions), tokens, all columns."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            # A Parquet file may hold dates, decimal numbers or bytes, which JSON does not have.
            digest.update(json.dumps(astuple(prompt), sort_keys=True, default=repr).encode())
        return digest.hexdigest()[:16]


def load_prompts(
    data: DataConfig,
    split: Literal["train", "eval"],
    tokenizer,
    *,
    max_prompt_tokens: int,
    limit: str = "data.max_length",
    duplicates: Literal["keep", "drop"] = "keep",
) -> PromptSet:
    """Return the prompts of data.train or data.eval, in their order. Alike on every rank; enters no collective.

    data: files, the fate of a prompt of more than max_prompt_tokens ("error" or "drop"), the number of bad rows that
        may be left out, and variables of the chat template, which gets a row's `tools` as well.
    limit: name of max_prompt_tokens in messages.
    duplicates: fate of a row whose prompt and answer an earlier row has.

    A row's id is "file:line" with the name of its file, or with its path where two files have the same name.
    Raises UserError, one line, for every mistake in files, rows or options.
    """
    paths, sources = files_and_sources(data.paths(split), f"data.{split}")
    check_template_kwargs(data.template_kwargs, tokenizer)
    names = Counter(os.path.basename(path) for path in set(paths))
    prompts, of_file, dropped, repeated, keep_system = [], [], 0, 0, 0
    forms = Counter[str]()
    known: set[bytes] = set()
    rejects = Rejects(f"data.{split}", paths, data.max_rejects)
    speaks = environment.rank_and_world()[0] == 0  # every rank reads all rows
    progress = Progress("tokenizing", f"prompts of data.{split}", lambda: count_rows(paths), speaks)
    for unread in unread_rows(paths, f"data.{split}"):
        progress.advance()
        with rejects.instead_of_error(unread):
            row = read_row(unread, data, prompts=True)
            if duplicates == "drop" and (question := _digest(row)) in known:
                repeated += 1
                continue
            name = os.path.basename(unread.path)
            id = f"{name if names[name] == 1 else unread.path}:{unread.number}"
            tools = check_tools(row.values.get("tools"), row.place)
            template = Template(tokenizer, row.place, tools, data.template_variables)
            prompt = to_prompt(row, template, id, os.path.splitext(name)[0])
            if duplicates == "drop":  # not before: a bad row is not the one to keep
                known.add(question)
            if (length := len(prompt.tokens)) <= max_prompt_tokens:
                prompts.append(prompt)
                forms[row.form] += 1
                keep_system += row.keeps_system
                of_file.append(unread.file)
            elif data.overlong == "drop":
                dropped += 1
            else:
                raise UserError(
                    f"{row.place}: the prompt's {length} tokens are more than {limit}={max_prompt_tokens}: raise it, "
                    f"or set data.overlong=drop (leave such rows out); now it is error"
                )
    if not prompts:
        raise nothing_left(rejects, dropped, "prompts", f"{limit}={max_prompt_tokens}")
    mixture = mixture_of(data, np.array(of_file), sources) if split == "train" else None
    return PromptSet(tuple(prompts), dropped, repeated, tuple(rejects.rows), forms, keep_system, mixture)


def _digest(row: Row) -> bytes:
    """Hash the question of a row: its prompt as it stands in the file, its tools, and the answer."""
    asked = [[row.values.get(name) for name in (*PROMPT_KEYS, "tools")], find_answer(row.values)]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=repr).encode()).digest()


def to_prompt(row: Row, template: Template, id: str, source: str) -> Prompt:
    """Return the prompt of a row.

    answer: the row's value of the first of ANSWER_KEYS that is there.
    source: the row's `data_source`, else `source`.
    extra: all columns but the prompt, `answer` and `data_source`, by their names in the file.
    """
    values, place = row.values, row.place
    check_columns(values, place, row.took)
    key = next((key for key in PROMPT_KEYS if key in values), None)
    if key is None:
        keys = listed(sorted(values)) or "none"
        raise UserError(
            f"{place}: no prompt (keys: {keys}): a row has `prompt` (text or messages) or `messages`, or a form of "
            "docs/data.md"
        )
    value = values[key]
    if isinstance(value, str) and key == "prompt":
        tokens, prompt = encode_text(value, template), value
    else:
        messages = check_messages(value, key, place).messages
        tokens, prompt = encode_messages(messages, key, template), tuple(messages)
    if not tokens:
        raise UserError(f"{place}: `{key}` has no tokens ({shown(value)}): fill it in or drop the row")
    source = values.get("data_source", source)
    if not isinstance(source, str):
        raise UserError(f"{place}: `data_source` must be text, not {shown(source)}")
    extra = {name: value for name, value in values.items() if name not in (key, "answer", "data_source")}
    return Prompt(id=id, tokens=tuple(tokens), prompt=prompt, answer=find_answer(values), source=source, extra=extra)


def encode_text(text: str, template: Template) -> list[int]:
    if not text.strip():  # a token that stands before every text would hide it
        raise UserError(f"{template.place}: `prompt` is empty: fill it in or drop the row")
    refuse_tools(template, "prompt")
    return encode(template.tokenizer, text)


def encode_messages(messages: list[dict[str, Any]], key: str, template: Template) -> list[int]:
    place = template.place
    if not any(message.get("content", "").strip() for message in messages):
        raise UserError(f"{place}: `{key}` has no content: fill it in or drop the row")
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{place}: `{key}` ends with the assistant's turn, which is what is to be generated: take that turn out"
        )
    messages = as_the_template_reads(messages, key, template, "give `prompt` as plain text")
    return render(messages, template, prompt=True)[1]


def find_answer(values: Mapping[str, Any]) -> Any:
    for name in ANSWER_KEYS:
        value: Any = values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def stop_tokens(folder: Path, tokenizer: Any, template_kwargs: Mapping[str, Any] = NOTHING) -> tuple[int, ...]:
    """Return the tokens that end a completion: the tokenizer's end token, those that the folder declares, and those
    that end the assistant's turns in the chat template."""
    declared = declared_stops(folder, max(tokenizer.get_vocab().values()))
    stop = tuple(sorted({*declared, *turn_ends(tokenizer, template_kwargs).values()}))
    if not stop:
        raise UserError(
            f"neither the tokenizer and its chat template nor generation_config.json of {folder} names a token that "
            "ends a completion: set eos_token in tokenizer_config.json"
        )
    return stop
