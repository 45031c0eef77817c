"""One row of text -> token ids and the mask of its targets.

Shape suffix: T tokens of one sample. Three forms of rows, looked for in this order:

    messages               a conversation; the targets are the assistant's turns, each with its end-of-turn token
    prompt + completion    the targets are the completion (its assistant turns, if messages) and the end of sequence
    text                   every token but the first is a target

Two roads lead to the assistant's turns. A chat template with `{% generation %}` marks says itself what they are. Any
other is asked twice a turn: what it renders up to the point where the model would start to speak must be, in tokens,
the beginning of what it renders for the whole conversation; the turn goes from there to its end-of-turn token.
Either way the template is given the `tools` of the row and the variables of data.template_kwargs, each time.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from isoloss.engine.data.chat_template import (
    NOTHING,
    Messages,
    Template,
    check_template,
    check_templates,
    check_tools,
    refuse_tools,
    render,
)
from isoloss.engine.data.rows import Row, listed, one_line, shown
from isoloss.models.weights.hf_checkpoint import sidecars
from isoloss.models.weights.manifest import IS_A_POINTER, is_pointer
from isoloss.parallel.runtime.errors import UserError

FORMS = "`messages`, or `prompt` and `completion`, or `text`"
# Without one of these AutoTokenizer may still build a tokenizer, of a single token, from config.json alone.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
                    "sentencepiece.bpe.model", "tekken.json", "tokenizer.tiktoken")  # fmt: skip
GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

TokensAndMask = tuple[list[int], list[bool]]


def load_tokenizer(folder: str, vocab_size: int):
    """The Hugging Face tokenizer of a local folder; its ids must fit `vocab_size` rows of embeddings."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"tokenizer: no such folder: {folder}: give a folder that holds a tokenizer (tokenizer.json)")
    if not any((path / name).is_file() for name in VOCABULARY_FILES):
        raise UserError(f"tokenizer: {folder} holds none: copy tokenizer.json and tokenizer_config.json into it")
    if pointers := [name for name in sidecars(path) if is_pointer(path / name)]:
        raise UserError(f"tokenizer: {path / pointers[0]} {IS_A_POINTER}")
    from transformers import AutoTokenizer

    try:
        # Said, for what asks to run code of the folder would else ask the user, and wait.
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever its parsers raise, it is these files that need mending
        raise UserError(f"tokenizer: {folder} does not load ({one_line(error)}): fix its tokenizer files") from error
    check_templates(tokenizer, folder)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < 0:
        raise UserError(f"tokenizer: {folder} has no token: copy its files again from the model's source")
    if largest >= vocab_size:
        raise UserError(
            f"tokenizer: {folder} has token ids up to {largest}, but the model's vocab_size is {vocab_size}: "
            f"use the tokenizer of this model, or a vocab_size of at least {largest + 1}"
        )
    tokenizer.model_max_length = 1 << 60  # our own limit names the row; transformers would only warn of doom
    return tokenizer


def tokenize_row(row: Row, tokenizer, template_kwargs: Mapping[str, Any] = NOTHING) -> TokensAndMask:
    """(token ids [T], mask [T]) of a row; mask[0] is False, and some other is True. UserError names the row."""
    values, place = row.values, row.place
    template = Template(tokenizer, place, check_tools(values.get("tools"), place), template_kwargs)
    if "messages" in values:
        messages = check_messages(values["messages"], "messages", place)
        tokens_T, mask_T = tokenize_chat(messages, template)
    elif "prompt" in values and "completion" in values:
        tokens_T, mask_T = tokenize_completion(values["prompt"], values["completion"], template)
    elif "text" in values:
        refuse_tools(template, "text")
        if not isinstance(values["text"], str):
            raise UserError(f"{place}: `text` must be text, not {shown(values['text'])}")
        tokens_T = with_end(encode(tokenizer, values["text"]), tokenizer)
        mask_T = [True] * len(tokens_T)
    else:
        keys = listed(sorted(values)) or "none"
        raise UserError(f"{place}: unknown kind of row (keys: {keys}): a row has {FORMS}")
    if mask_T:
        mask_T[0] = False  # nothing before it to predict it from
    if not any(mask_T):
        raise no_target(place, next(key for key in ("messages", "completion", "text") if key in values))
    return tokens_T, mask_T


def tokenize_completion(prompt: Any, completion: Any, template: Template) -> TokensAndMask:
    """Two texts, or a conversation of which only the turns in `completion` are targets."""
    tokenizer, place = template.tokenizer, template.place
    if isinstance(prompt, str) and isinstance(completion, str):
        refuse_tools(template, "prompt")
        # Apart, as when generating: a token never spans the border. "" gives no targets, not even the end.
        head = encode(tokenizer, prompt)
        tail = encode(tokenizer, completion, special=False)
        tail = with_end(tail, tokenizer) if tail else tail
        return head + tail, [False] * len(head) + [True] * len(tail)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    prompt = check_messages(prompt, "prompt", place)
    if isinstance(completion, str):
        # Checked here: the template would make a target of the end-of-turn token alone.
        if not completion:
            raise no_target(place, "completion")
        completion = [{"role": "assistant", "content": completion}]
    completion = check_messages(completion, "completion", place)
    return tokenize_chat(prompt + completion, template, first=len(prompt))


def check_messages(value: Any, key: str, place: str) -> Messages:
    """Messages without their null entries, content that is a list of text parts as one text.

    `role` and `content` are required; a tool call may go without content.
    """
    if not isinstance(value, list) or not value:
        kinds = "text or a list" if key in ("prompt", "completion") else "a list"
        raise UserError(f"{place}: `{key}` must be {kinds} of {{role, content}} messages, not {shown(value)}")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise UserError(f"{place}: `{key}[{number}]` must be an object with role and content, not {shown(message)}")
        if message.get("content") and isinstance(message["content"], list):
            message = message | {"content": join_parts(message["content"], f"{key}[{number}].content", place)}
        for field in ("role", "content"):
            if field == "content" and message.get("content") is None and message.get("tool_calls"):
                continue
            if not isinstance(message.get(field), str):
                raise UserError(f"{place}: `{key}[{number}].{field}` must be text, not {shown(message.get(field))}")
        messages.append({field: entry for field, entry in message.items() if entry is not None})
    return messages


def join_parts(parts: list[Any], key: str, place: str) -> str:
    """The text of content that is given as a list of parts, {"type": "text", "text": ...}, without anything between."""
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"a part of type {listed([str(kind)])!r}" if kind else shown(part)
            raise UserError(
                f"{place}: `{key}[{number}]` must be a part of text, {{type: text, text: ...}}, not {what}: isoloss "
                "trains on text alone; take the part or the row out"
            )
    return "".join(part["text"] for part in parts)


# --------------------------------------------------------------------------------------------------------------- tokens


def encode(tokenizer, text: str, special: bool = True) -> list[int]:
    """Token ids, with the tokens that the tokenizer puts in front of a text (`special`) but never its end token."""
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    ends_itself = special and len(ids) > 0 and ids[-1] == tokenizer.eos_token_id
    return ids[:-1] if ends_itself and not text.endswith(tokenizer.eos_token) else ids


def with_end(ids: list[int], tokenizer) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def tokenize_chat(messages: Messages, template: Template, first: int = 0) -> TokensAndMask:
    """A conversation; the targets are the assistant's turns among messages[first:]."""
    tokenizer, place = template.tokenizer, template.place
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        roles = listed(message["role"] for message in messages[first:])
        raise UserError(f"{place}: no assistant turn to learn from (roles: {roles}): add one or take the row out")
    check_template(tokenizer, place, "use `text` or plain `prompt` and `completion` rows")
    if GENERATION_MARK.search(template.text) and maps_characters(tokenizer):
        return marked_turns(messages, first, template)
    return turns_by_prefix(messages, turns, template)


@lru_cache(maxsize=4)
def maps_characters(tokenizer) -> bool:
    """Whether every character belongs to a token, as `return_assistant_tokens_mask` needs.

    Byte-level tokenizers with `trim_offsets` (Llama 3) give white space to no token. transformers then drops targets
    from a turn that starts with a space on, and takes all that follows a turn that ends with a line break for targets.
    """
    probe = "a  b\n\n c\n d "
    encoded = tokenizer(probe, add_special_tokens=False)
    return tokenizer.is_fast and all(encoded.char_to_token(i) is not None for i in range(len(probe)))


@lru_cache(maxsize=4)
def special_ids(tokenizer) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


def marked_turns(messages: Messages, first: int, template: Template) -> TokensAndMask:
    """Targets as the template's `{% generation %}` blocks mark them."""
    out = template(messages, return_dict=True, return_assistant_tokens_mask=True)
    tokens_T, mask_T = list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
    if first:
        _, head = render(messages[:first], template)
        if tokens_T[: len(head)] != head:
            raise not_prefix_stable(template.place, first)
        mask_T[: len(head)] = [False] * len(head)
    return tokens_T, mask_T


def turns_by_prefix(messages: Messages, turns: Sequence[int], template: Template) -> TokensAndMask:
    """Targets by comparing renderings, for templates without marks."""
    text, tokens_T = render(messages, template)
    mask_T = [False] * len(tokens_T)
    for turn in turns:
        head_text, head = render(messages[:turn], template, prompt=True)
        if template.kwargs and not text.startswith(head_text):
            # What the variables add where the assistant starts to speak may be gone from turns before the last one
            # (Qwen3 with enable_thinking=false: empty thoughts): such a turn begins as it does without them.
            head_text, head = render(messages[:turn], replace(template, kwargs=NOTHING), prompt=True)
        if tokens_T[: len(head)] != head:
            if text.startswith(head_text):
                raise UserError(
                    f"{template.place}: messages[{turn}] merges with the generation prompt before it into one token: "
                    f"take the white space off its start, or mark the turns in chat_template.jinja with "
                    f"{{% generation %}}"
                )
            raise not_prefix_stable(template.place, turn)
        end = end_of_turn(messages, turn, tokens_T, head, template)
        mask_T[len(head) : end] = [True] * (end - len(head))
    return tokens_T, mask_T


def end_of_turn(messages: Messages, turn: int, tokens_T: list[int], head: list[int], template: Template) -> int:
    """Where messages[turn] ends in `tokens_T`: one past its end-of-turn token.

    The conversation up to and with the turn, rendered, ends with that token and often a line break, which belongs to
    the template: generation stops before it. Some templates (Qwen3) render a turn otherwise, with its thoughts or empty
    ones, while it is the last one. Then the turn of the whole conversation ends at the first token of that kind, if
    what comes before the token is the message (its content, or what was rendered of it), or the end of it, and not a
    part of the next message as well.
    """
    tokenizer, place = template.tokenizer, template.place
    _, so_far = render(messages[: turn + 1], template)
    if so_far[: len(head)] != head:
        raise not_prefix_stable(place, turn)
    end = len(so_far)
    while end > len(head) and not tokenizer.decode([so_far[end - 1]]).strip():
        end -= 1
    has_end_token = end > len(head) and so_far[end - 1] in special_ids(tokenizer)
    end = end if has_end_token else len(so_far)
    if tokens_T[:end] == so_far[:end]:
        return end
    if has_end_token and so_far[end - 1] in tokens_T[len(head) :]:
        alone = decoded(so_far[len(head) : end - 1], tokenizer)
        end = tokens_T.index(so_far[end - 1], len(head)) + 1
        rendered = decoded(tokens_T[len(head) : end - 1], tokenizer)
        if alone.endswith(rendered) or messages[turn].get("content", "").strip().endswith(rendered):
            return end
    raise not_prefix_stable(place, turn)


def decoded(ids: list[int], tokenizer) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False).strip()


def no_target(place: str, key: str) -> UserError:
    return UserError(f"{place}: no token of `{key}` is a target (it is empty or too short): fill it in or drop the row")


def not_prefix_stable(place: str, turn: int) -> UserError:
    return UserError(
        f"{place}: the chat template is not prefix-stable: what it renders before messages[{turn}] is not the start of "
        f"the whole conversation: mark the assistant's turns in chat_template.jinja with {{% generation %}}"
    )
