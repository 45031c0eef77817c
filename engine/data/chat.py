"""Tokenize a row of text: token ids, and a mask of the targets.

Shape suffix: T tokens of one sample. A row has one of three forms (`columns` brings others into these):

    messages               a conversation; the targets are the assistant's turns, each with its end-of-turn token
    prompt + completion    the targets are the completion (its assistant turns, if messages) and the end of sequence
    text                   every token but the first is a target

`turns` finds the assistant's turns. Every rendering of the chat template gets the `tools` of the row and the variables
of data.template_kwargs.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from isoloss.engine.data.chat_template import (
    NOTHING,
    Template,
    as_the_template_reads,
    check_templates,
    check_tools,
    refuse_tools,
)
from isoloss.engine.data.columns import form_of
from isoloss.engine.data.messages import Conversation, check_messages
from isoloss.engine.data.rows import Row, listed, one_line, shown
from isoloss.engine.data.turns import TokensAndMask, maps_characters, tokenize_chat
from isoloss.models.weights.manifest import IS_A_POINTER, is_pointer
from isoloss.models.weights.side_files import sidecars
from isoloss.parallel.runtime.errors import UserError

# One of these must exist: without any, AutoTokenizer may build a tokenizer of a single token from config.json alone.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
                    "sentencepiece.bpe.model", "tekken.json", "tokenizer.tiktoken")  # fmt: skip
# Characters that a normalizer or decoder may make of one. Published ones replace a character by a few.
MAX_GROWTH = 100


def load_tokenizer(folder: str, vocab_size: int):
    """Load the Hugging Face tokenizer of a local folder.

    vocab_size: number of rows of the model's embedding, above every token id.
    Raises UserError if the files are missing, broken or hostile, or do not fit `vocab_size`.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"tokenizer: no such folder: {folder}: give a folder that holds a tokenizer (tokenizer.json)")
    if not any((path / name).is_file() for name in VOCABULARY_FILES):
        raise UserError(f"tokenizer: {folder} holds none: copy tokenizer.json and tokenizer_config.json into it")
    if pointers := [name for name in sidecars(path) if is_pointer(path / name)]:
        raise UserError(f"tokenizer: {path / pointers[0]} {IS_A_POINTER}")
    from transformers import AutoTokenizer

    try:
        # Explicitly False: left out, transformers would ask the user whether to run code of the folder, and wait.
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # parsers raise anything, and each time the fix is to mend these files
        raise UserError(f"tokenizer: {folder} does not load ({one_line(error)}): fix its tokenizer files") from error
    check_growth(tokenizer, folder)
    check_templates(tokenizer, folder)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < 0:
        raise UserError(f"tokenizer: {folder} has no token: copy its files again from the model's source")
    if largest >= vocab_size:
        raise UserError(
            f"tokenizer: {folder} has token ids up to {largest}, but the model's vocab_size is {vocab_size}: "
            f"use the tokenizer of this model, or a vocab_size of at least {largest + 1}"
        )
    tokenizer.model_max_length = 1 << 60  # data.max_length names the row that is too long; transformers only warns
    map_all_characters(tokenizer)
    return tokenizer


def check_growth(tokenizer, folder: str) -> None:
    """Raise UserError if a tokenizer can lengthen a text over MAX_GROWTH times: a few words could fill the memory."""
    if not tokenizer.is_fast:
        return
    for name in ("normalizer", "decoder"):
        part = getattr(tokenizer.backend_tokenizer, name)
        if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > MAX_GROWTH:
            raise UserError(
                f"tokenizer: {folder}: its {name} can make a text {growth:,.0f} times as long, more than {MAX_GROWTH}: "
                "copy tokenizer.json again from the model's source, and do not use it if it is the same there"
            )


def _growth(part: Mapping[str, Any]) -> float:
    """Return the factor by which a normalizer or decoder, with its inner ones in sequence, can lengthen a text."""
    inner = prod(map(_growth, part.get("normalizers", part.get("decoders", ()))))
    replaced = len(part.get("pattern", {}).get("String", "")) or 1  # a regular expression may match one character
    return inner * max(1.0, len(part.get("content", part.get("prepend", ""))) / replaced)


def map_all_characters(tokenizer) -> None:
    """Make a byte-level tokenizer map white space to the tokens that hold it. Token ids stay the same."""
    # With `trim_offsets` (Llama 3) white space belongs to no token, and the ends of turns could not be found there.
    if tokenizer.is_fast and not maps_characters(tokenizer):
        processor = tokenizer.backend_tokenizer.post_processor
        for part in processor if hasattr(processor, "__getitem__") else [processor]:
            if hasattr(part, "trim_offsets"):
                part.trim_offsets = False
        tokenizer.backend_tokenizer.post_processor = processor
        maps_characters.cache_clear()


def tokenize_row(row: Row, tokenizer, template_kwargs: Mapping[str, Any] = NOTHING) -> TokensAndMask:
    """Return (token ids [T], mask [T]) of a row, the mask True at targets: never at the first token, at one at least.

    Raises UserError, with the row's place, for a row that cannot be trained on.
    """
    values, place = row.values, row.place
    template = Template(tokenizer, place, check_tools(values.get("tools"), place), template_kwargs)
    form = form_of(values, place)
    if form == ("messages",):
        conversation = check_messages(values["messages"], "messages", place)
        tokens_T, mask_T = tokenize_chat(read_by(template, conversation, "messages"), template)
    elif form == ("prompt", "completion"):
        tokens_T, mask_T = tokenize_completion(values["prompt"], values["completion"], template)
    else:
        refuse_tools(template, "text")
        if not isinstance(values["text"], str):
            raise UserError(f"{place}: `text` must be text, not {shown(values['text'])}")
        tokens_T = with_end(encode(tokenizer, values["text"]), tokenizer)
        mask_T = [True] * len(tokens_T)
    if mask_T:
        mask_T[0] = False  # no token before it predicts it
    if not any(mask_T):
        raise no_target(place, form[-1])
    return tokens_T, mask_T


def tokenize_completion(prompt: Any, completion: Any, template: Template) -> TokensAndMask:
    """Tokenize two texts, or a conversation in which only the turns of `completion` are targets. Raises UserError."""
    tokenizer, place = template.tokenizer, template.place
    if isinstance(prompt, str) and isinstance(completion, str):
        refuse_tools(template, "prompt")
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"{place}: a completion needs a token that ends it, or the model would never learn to stop: set "
                f"eos_token in tokenizer_config.json of {tokenizer.name_or_path}"
            )
        # Tokenized separately, as in generation: no token spans the border. "" has no targets, not even the end.
        head = encode(tokenizer, prompt)
        tail = encode(tokenizer, completion, special=False)
        tail = with_end(tail, tokenizer) if tail else tail
        return head + tail, [False] * len(head) + [True] * len(tail)
    parts = {"prompt": (prompt, "user"), "completion": (completion, "assistant")}
    asked, answered = (
        read_by(template, check_messages(as_messages(part, role), key, place), key)
        for key, (part, role) in parts.items()
    )
    return tokenize_chat(asked.context() + answered, template)


def as_messages(value: Any, role: str) -> Any:
    """Return a text as a conversation of one message, and any other value unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def read_by(template: Template, conversation: Conversation, key: str) -> Conversation:
    """Return the conversation of column `key` in the form that the template reads. Raises UserError if no turn of it is
    learned, unless it is a prompt, or if the template would not read a part of it."""
    otherwise = "use `text` or plain `prompt` and `completion` rows"
    if key != "prompt" and not any(conversation.learned):
        turns = [message for message in conversation.messages if message["role"] == "assistant"]
        raise no_target(template.place, key) if turns else no_turn(template.place, conversation)
    messages = as_the_template_reads(conversation.messages, key, template, otherwise)
    return replace(conversation, messages=messages)


# --------------------------------------------------------------------------------------------------------------- tokens


def encode(tokenizer, text: str, special: bool = True) -> list[int]:
    """Return the token ids of a text, with the tokenizer's prefix if `special`, and without an added end token."""
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    if special:
        # A text that was rendered before may begin with the prefix already: the tokenizer then adds a second one.
        prefix = prefix_of(tokenizer)
        if prefix and ids[len(prefix) : 2 * len(prefix)] == prefix:
            ids = ids[len(prefix) :]
    ends_itself = special and len(ids) > 0 and ids[-1] == tokenizer.eos_token_id
    return ids[:-1] if ends_itself and not text.endswith(tokenizer.eos_token) else ids


@lru_cache(maxsize=4)
def prefix_of(tokenizer) -> list[int]:
    """Return the tokens that the tokenizer adds in prefix of every text."""
    alone, marked = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return list(marked[: next((n for n in range(len(marked)) if marked[n:][: len(alone)] == alone), 0)])


def with_end(ids: list[int], tokenizer) -> list[int]:
    """Append the end-of-sequence token, if the tokenizer has one and the ids do not end with it."""
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def no_turn(place: str, conversation: Conversation) -> UserError:
    roles = listed(message["role"] for message in conversation.messages)
    return UserError(f"{place}: no assistant turn to learn from (roles: {roles}): add one or take the row out")


def no_target(place: str, key: str) -> UserError:
    return UserError(f"{place}: no token of `{key}` is a target (it is empty or too short): fill it in or drop the row")
