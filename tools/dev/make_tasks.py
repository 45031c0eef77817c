"""Make the small tasks on which the recipes show reinforcement learning: data, tokenizer, model configuration.

    python -m isoloss.tools.dev.make_tasks --task sort --out recipes/assets/sort

Each task has a careless demonstrator, who makes one systematic mistake most of the time. Supervised fine-tuning on its
demonstrations gives a model that is right sometimes; reinforcement learning against a checker makes it right mostly.
Nothing is downloaded, and the same task always gives the same bytes.
"""

import json
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase

from isoloss.recipes.launch import ASSETS
from isoloss.tools import command_line
from isoloss.tools.dev import make_tiny

EVAL_ROWS = 512
# Tokens in addition to the 256 bytes: a question is then a handful of tokens, while letters and digits stay one each.
WORDS = ("user", "assistant", "Sort", " the", " letters", "What", " is")


@dataclass(frozen=True)
class Problem:
    """A question, its answer, and the answer with the systematic mistake (the same where the mistake is not
    possible)."""

    question: str
    answer: str
    mistaken: str


@dataclass(frozen=True)
class Task:
    """A task. draw(rng, taken): function that returns a random problem whose question is not among those taken.

    mistake_rate: share of problems in which the demonstrator makes the mistake.
    sft_rows, rl_rows: numbers of rows."""

    draw: Callable[[Random, Container[str]], Problem]
    mistake_rate: float
    sft_rows: int
    rl_rows: int


def draw_sort(rng: Random, taken: Container[str]) -> Problem:
    while True:
        letters = "".join(rng.sample(ascii_lowercase, 4))
        question = f"Sort the letters: {letters}"
        if question not in taken and letters not in WORDS:
            first, second, third, fourth = sorted(letters)
            return Problem(question, first + second + third + fourth, first + second + fourth + third)


def draw_carry(rng: Random, taken: Container[str]) -> Problem:
    """Draw a sum. Four of five have a carry from the units to the tens; of all pairs 45 in 100 would."""
    wanted = rng.random() < 0.8
    while True:
        a, b = rng.randrange(50), rng.randrange(50)
        question, carries = f"What is {a} + {b}?", a % 10 + b % 10 >= 10
        if question not in taken and carries == wanted:
            return Problem(question, str(a + b), str(a + b - 10 * carries))


TASKS = {
    "sort": Task(draw_sort, mistake_rate=0.65, sft_rows=10_240, rl_rows=4_096),
    "carry": Task(draw_carry, mistake_rate=0.75, sft_rows=10_240, rl_rows=4_096),
}


# ---------------------------------------------------------------------------------------------------------------- rows


def make_rows(name: str) -> dict[str, list[dict]]:
    """Make the rows of sft, rl and eval. Questions of eval are in neither of the others, which may share some."""
    task, rng = TASKS[name], Random(f"isoloss {name}")
    held_out: dict[str, Problem] = {}
    while len(held_out) < EVAL_ROWS:
        problem = task.draw(rng, held_out)
        held_out[problem.question] = problem

    def draws(count: int) -> Iterator[Problem]:
        return (task.draw(rng, held_out) for _ in range(count))

    def careless(problem: Problem) -> str:
        return problem.mistaken if rng.random() < task.mistake_rate else problem.answer

    def checked(problems: Iterable[Problem]) -> list[dict]:
        return [{"prompt": user_turn(problem), "answer": problem.answer, "data_source": name} for problem in problems]

    return {
        "sft": [{"prompt": user_turn(problem), "completion": careless(problem)} for problem in draws(task.sft_rows)],
        "rl": checked(draws(task.rl_rows)),
        "eval": checked(held_out.values()),
    }


def user_turn(problem: Problem) -> list[dict]:
    return [{"role": "user", "content": problem.question}]


# --------------------------------------------------------------------------------------------------------------- files


def make_tokenizer(out: Path) -> None:
    """Make a tokenizer of bytes, the special tokens of the chat template, and WORDS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = [make_tiny.PADDING, make_tiny.START_OF_TURN, make_tiny.END_OF_TURN]
    tokens = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    make_tiny.save_tokenizer(tokenizer, out)


def main(argv: list[str] | None = None) -> None:
    """Write data and tokenizer of --task into --out, with copies of the config.json and README.md that ship."""
    parser = command_line.parser("dev.make_tasks", __doc__)
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write; its files of the same names are replaced"
    )
    arguments = parser.parse_args(argv)
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in make_rows(arguments.task).items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
        print(f"{name}: {len(rows)} rows")
    make_tokenizer(out)
    for name in ("config.json", "README.md"):
        (out / name).write_bytes((ASSETS / arguments.task / name).read_bytes())


if __name__ == "__main__":
    main()
