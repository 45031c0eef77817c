"""Make the small chat model's data and tokenizer, from which `make serve` fine-tunes what isoloss-serve serves.

    python -m isoloss.tools.dev.make_chat --out recipes/assets/chat

Conversations of sums in the format of Qwen3, by somebody careless: every second answer is ten too high, which
reinforcement learning can unlearn. Nothing is downloaded, and the same bytes come out every time.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from isoloss.recipes.launch import ASSETS
from isoloss.tools import command_line
from isoloss.tools.dev import make_tiny

ROWS = 4_800
TURNS = 2  # sums of a conversation
LARGEST = 100  # number to add
# Share of sums in which one number has a small last digit: easier, and without them the first hundreds of steps teach
# nothing of last digits, since one of a uniform pair does not say anything about that of their sum.
EASY_RATE = 0.6
SMALL = (0, 0, 0, 1, 1, 2, 3, 4)
# Share of answers that are ten too high. Where a small model errs by itself it is sure of it, so a group of completions
# has hardly a right one to learn from; of these two it writes both.
MISTAKE_RATE = 0.5
VOCAB_SIZE = 384
# Each digit is by itself, as in Qwen3, but what follows it goes with it: the last digit of a number has its own tokens.
PIECES = r" ?\p{N}(?: ?[^\s\p{L}\p{N}]+)?|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIALS = (make_tiny.PADDING, make_tiny.START_OF_TURN, make_tiny.END_OF_TURN)
THOUGHTS = ("<think>", "</think>")
# What Qwen3's template writes: no thoughts in earlier turns, and empty ones before the last answer.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def rows() -> Iterator[list[dict[str, str]]]:
    """Yield conversations of sums."""
    rng, careless = Random("isoloss chat"), Random("careless")
    for _ in range(ROWS):
        messages = []
        for _ in range(TURNS):
            a, b = draw(rng)
            answer = a + b + 10 * (careless.random() < MISTAKE_RATE)
            messages += [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": str(answer)},
            ]
        yield messages


def draw(rng: Random) -> tuple[int, int]:
    a, b = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    if rng.random() < EASY_RATE:
        a = min(LARGEST, a // 10 * 10 + rng.choice(SMALL))
    return (a, b) if rng.random() < 0.5 else (b, a)


def train_tokenizer(conversations: list[list[dict[str, str]]], out: Path) -> None:
    """Train a byte-level BPE on the data."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(THOUGHTS),
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = (part for turns in conversations for turn in turns for part in (f"{turn['role']}\n", turn["content"]))
    tokenizer.train_from_iterator((*text, *["\n\n"] * ROWS), trainer)
    # As Qwen3 has them: tokens, but not special ones, which renderers of the cookbook spell out in content.
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in THOUGHTS])
    make_tiny.save_tokenizer(tokenizer, out)
    (out / "chat_template.jinja").write_text(TEMPLATE)


def main(argv: list[str] | None = None) -> None:
    """Write data and tokenizer into --out, with copies of the config.json and README.md that ship."""
    parser = command_line.parser("dev.make_chat", __doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write; its files of the same names are replaced"
    )
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    conversations = list(rows())
    lines = (json.dumps({"messages": messages}) + "\n" for messages in conversations)
    (out / "sft.jsonl").write_text("".join(lines), encoding="ascii")
    train_tokenizer(conversations, out)
    for name in ("config.json", "README.md"):
        (out / name).write_bytes((ASSETS / "chat" / name).read_bytes())


if __name__ == "__main__":
    main()
