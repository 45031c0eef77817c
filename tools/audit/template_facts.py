"""Find out what the chat template does at the border of prompt and answer, on rows of the data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isoloss.engine.data.chat import as_messages, tokenize_row
from isoloss.engine.data.chat_template import Template, as_the_template_reads, check_tools, render
from isoloss.engine.data.messages import WEIGHTS, check_messages
from isoloss.engine.data.rows import Row
from isoloss.parallel import UserError

CHECKED = 100  # rows, from the first one


@dataclass(frozen=True)
class TemplateFacts:
    """The border of prompt and answer in training and in generation, and the tokens that end turns.

    checked: number of conversations whose first answer was compared.
    differing: places of those among them whose generation prompt is not what training has before the first target.
    generated, trained: end of the generation prompt, and of what training has in its place, of the first of these.
    ends: tokens that end learned turns.
    undeclared: tokens among `ends` that generation_config.json and config.json of the model do not name.
    """

    checked: int
    differing: Sequence[str]
    generated: str
    trained: str
    ends: Sequence[str]
    undeclared: Sequence[str]


def template_facts(
    rows: Sequence[Row], tokenizer: Any, variables: Mapping[str, Any], ends: Mapping[str, int], declared: Sequence[int]
) -> TemplateFacts:
    """Return the facts. rows: rows that can be tokenized. declared: tokens that the model's folder names as ends."""
    borders = [(row.place, *border) for row in rows if (border := border_of(row, tokenizer, variables))]
    different = [(place, *border) for place, *border in borders if border[0] != border[1]]
    generated, trained = tails(tokenizer, *different[0][1:]) if different else ("", "")
    undeclared = [name for name, number in ends.items() if number not in declared]
    return TemplateFacts(len(borders), [row[0] for row in different], generated, trained, list(ends), undeclared)


def border_of(row: Row, tokenizer: Any, variables: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """Return the tokens of the generation prompt before the first answer of a row, and those that training has before
    its first target. None for a row without messages, or whose first answer has nothing before it or is not learned."""
    values, place = row.values, row.place
    if "messages" in values:
        conversation = check_messages(values["messages"], "messages", place)
    elif isinstance(values.get("prompt"), list) or isinstance(values.get("completion"), list):
        asked, answered = (
            check_messages(as_messages(values[key], role), key, place)
            for key, role in (("prompt", "user"), ("completion", "assistant"))
        )
        conversation = asked.context() + answered
    else:
        return None
    first = next(i for i, message in enumerate(conversation.messages) if message["role"] == "assistant")
    if first == 0 or not conversation.learned[first]:
        return None
    template = Template(tokenizer, place, check_tools(values.get("tools"), place), variables)
    prompt = as_the_template_reads(conversation.messages[:first], "messages", template, "")
    tokens_T, mask_T = tokenize_row(row, tokenizer, variables)
    return render(prompt, template, prompt=True)[1], list(tokens_T[: mask_T.index(True)])


def tails(tokenizer: Any, generated: Sequence[int], trained: Sequence[int]) -> tuple[str, str]:
    """Return the texts of both from the first token that differs, with some tokens before it."""
    shared = next((i for i, (a, b) in enumerate(zip(generated, trained)) if a != b), min(len(generated), len(trained)))
    start = max(0, shared - 4)
    return tokenizer.decode(list(generated[start:])), tokenizer.decode(list(trained[start:]))


def muted(row: Row, mask_T: Sequence[bool], tokenizer: Any, variables: Mapping[str, Any]) -> list[bool]:
    """Return which tokens [T] would be targets if no message of the row had a weight of 0."""
    weighted = [key for key in ("messages", "completion") if isinstance(row.values.get(key), list)]
    plain = {
        key: [{name: entry for name, entry in message.items() if name not in WEIGHTS} for message in row.values[key]]
        for key in weighted
    }
    if all(plain[key] == row.values[key] for key in weighted):
        return [False] * len(mask_T)
    try:
        _, all_T = tokenize_row(Row(row.place, row.values | plain), tokenizer, variables)
    except UserError:  # such a turn may be one that cannot be learned, with a weight of 0 for that reason
        return [False] * len(mask_T)
    return [learned and not target for learned, target in zip(all_T, mask_T)]
