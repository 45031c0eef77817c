"""Choose the part of a completion that is scored: one rule for all reward functions (docs/rewards.md)."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from isoloss.engine.rl.trajectory import Completion, Prompt

OPEN, CLOSE = "<think>", "</think>"
# Marks of thoughts in published chat templates, as (open, close); templates write the same thought with either.
MARKS = (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|channel>thought\n", "<channel|>"))
# A message of gpt-oss: <|channel|>NAME ...<|message|>BODY, and the token that ends it, absent in a cut-off message.
MESSAGE = re.compile(
    r"<\|channel\|>\s*(\w+)(?:(?!<\|message\|>|<\|channel\|>).)*<\|message\|>(.*?)"
    r"(<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>|<\|channel\|>)|\Z)",
    re.DOTALL,
)
PROMPT_TOKENS = 16  # of the end of a prompt: an opened thought and white space take fewer


class Texts(NamedTuple):
    """The texts of a completion.

    plain: without special tokens and stop token.
    raw: text of all its tokens.
    marked: its thoughts between <think> and </think>, whatever marks the model has, a thought that its prompt opened
        included; otherwise as plain.
    """

    plain: str
    raw: str
    marked: str

    @property
    def final(self) -> str:
        """The answer: what follows the last closed thought; nothing where a thought is unfinished."""
        after = self.marked.rpartition(CLOSE)[2]
        return "" if OPEN in after else after


def read(prompt: Prompt, completion: Completion, tokenizer) -> Texts:
    def decode(tokens: Sequence[int], plain: bool = False) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=plain, clean_up_tokenization_spaces=False)

    tokens = completion.tokens[:-1] if completion.finish == "stop" else completion.tokens
    plain, raw, body = decode(tokens, True), decode(completion.tokens), decode(tokens)
    opening = decode(prompt.tokens[-PROMPT_TOKENS:])
    marked = mark(opening, body, completion.finish == "stop")
    thoughtless = marked == body and OPEN not in body and CLOSE not in body
    return Texts(plain, raw, plain if thoughtless else bare(marked, tokenizer))


def mark(opening: str, body: str, ended: bool) -> str:
    """opening: the end of the prompt. ended: whether the model ended its last message by itself."""
    channel = re.search(r"<\|channel\|>\w+[^<]*<\|message\|>\Z", opening)
    if channel or MESSAGE.search(body):
        messages = MESSAGE.finditer((channel[0] if channel else "") + body)
        return "\n".join(
            text if name == "final" else OPEN + text + (CLOSE if end or ended else "")
            for name, text, end in (found.groups() for found in messages)
        )
    for left, right in MARKS:
        opening, body = opening.replace(left, OPEN), body.replace(left, OPEN).replace(right, CLOSE)
    return (OPEN if opening.rstrip().endswith(OPEN) else "") + body


def bare(text: str, tokenizer) -> str:
    """Without special tokens, but with the marks of thoughts, which are such tokens in some tokenizers."""
    for token in tokenizer.all_special_tokens:
        if token not in (OPEN, CLOSE):
            text = text.replace(token, "")
    return text
