"""Make the small tasks on which the recipes show reinforcement learning: data, tokenizer, model configuration.

    python -m isoloss.tools.make_tasks --task sort --out recipes/assets/sort

Each task has a careless demonstrator, who makes one systematic mistake most of the time. Supervised fine-tuning on its
demonstrations gives a model that is right sometimes; reinforcement learning against a checker makes it right mostly.
Nothing is downloaded, and the same task always gives the same bytes.
"""

import argparse
import json
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase

from isoloss.tools import make_tiny

EVAL_ROWS = 512
VOCAB_SIZE = 320
# Tokens besides the 256 bytes: a question is then a handful of tokens, while letters and digits stay one each.
WORDS = ("user", "assistant", "Sort", " the", " letters", "What", " is")


@dataclass(frozen=True)
class Problem:
    """A question, its answer, and the answer of somebody who makes the mistake (the same where there is none to
    make)."""

    question: str
    answer: str
    mistaken: str


@dataclass(frozen=True)
class Task:
    """draw(rng, taken): a random problem whose question is not among those taken. mistake_rate: how often the
    demonstrator makes the mistake. sft_rows, rl_rows: sizes. what, mistake: for the README."""

    draw: Callable[[Random, Container[str]], Problem]
    mistake_rate: float
    sft_rows: int
    rl_rows: int
    what: str
    mistake: str


def draw_sort(rng: Random, taken: Container[str]) -> Problem:
    while True:
        letters = "".join(rng.sample(ascii_lowercase, 4))
        question = f"Sort the letters: {letters}"
        if question not in taken and letters not in WORDS:
            first, second, third, fourth = sorted(letters)
            return Problem(question, first + second + third + fourth, first + second + fourth + third)


def draw_carry(rng: Random, taken: Container[str]) -> Problem:
    """Four problems of five have a carry from the units to the tens; of all pairs it would be 45 in 100."""
    wanted = rng.random() < 0.8
    while True:
        a, b = rng.randrange(50), rng.randrange(50)
        question, carries = f"What is {a} + {b}?", a % 10 + b % 10 >= 10
        if question not in taken and carries == wanted:
            return Problem(question, str(a + b), str(a + b - 10 * carries))


TASKS = {
    "sort": Task(
        draw_sort,
        mistake_rate=0.65,
        sft_rows=10_240,
        rl_rows=4_096,
        what="Four different letters, to be sorted: `Sort the letters: dbca` has the answer `abcd`.",
        mistake="swaps the last two letters of the answer in 65% of its demonstrations",
    ),
    "carry": Task(
        draw_carry,
        mistake_rate=0.75,
        sft_rows=10_240,
        rl_rows=4_096,
        what="Two numbers from 0 to 49, to be added, four times in five with a carry: `What is 17 + 25?` has the "
        "answer `42`.",
        mistake="forgets the carry in 75% of the demonstrations that have one (`17 + 25` is then `32`)",
    ),
}


# ---------------------------------------------------------------------------------------------------------------- rows


def make_rows(name: str) -> dict[str, list[dict]]:
    """The rows of sft, rl and eval. The questions of eval are in neither of the others, which may share some."""
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
    """Bytes, the special tokens of the chat template, and WORDS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = [make_tiny.PADDING, make_tiny.START_OF_TURN, make_tiny.END_OF_TURN]
    tokens = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    make_tiny.save_tokenizer(tokenizer, out)


def model_config() -> dict:
    """A Qwen3 of 435,072 parameters."""
    return make_tiny.model_config() | {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "vocab_size": VOCAB_SIZE,
    }


def readme(name: str) -> str:
    task = TASKS[name]
    return f"""# {name}

{task.what}

| file | what |
|---|---|
| `sft.jsonl` | {task.sft_rows:,} demonstrations (`prompt` + `completion`) of somebody who {task.mistake} |
| `rl.jsonl` | {task.rl_rows:,} problems with the right answer (`prompt` + `answer`), for the checker alone to see |
| `eval.jsonl` | {EVAL_ROWS} problems with the right answer whose questions are in neither of the other files |
| `tokenizer.json`, `tokenizer_config.json` | the 256 bytes, 3 special tokens and {len(WORDS)} words |
| `chat_template.jinja` | ChatML, with `{{% generation %}}` marks around the assistant's turns and their `<|im_end|>` |
| `config.json` | a Qwen3 of 2 layers and 435,072 parameters; no weights |

`sft.jsonl` and `rl.jsonl` are drawn independently: some questions may be in both, and a question may come up twice.

Fine-tuned on `sft.jsonl`, the model is as careless as the demonstrator, and more such demonstrations do not help it.
Reinforcement learning on `rl.jsonl`, with a reward of 1 for the right answer and 0 for any other, makes it right most
of the time on `eval.jsonl`. What that shows: reinforcement learning amplifies an answer that the model already gives
sometimes, where no right demonstrations are at hand, only a way to check. What it does not show: where right
demonstrations can be had, fine-tuning on them does as well or better for so simple a task.

Made by

    python -m isoloss.tools.make_tasks --task {name} --out recipes/assets/{name}

All of it is part of this project and under its licence.
"""


def main(argv: list[str] | None = None) -> None:
    """Write data, tokenizer, config.json and README.md of --task into --out."""
    parser = argparse.ArgumentParser(
        prog="python -m isoloss.tools.make_tasks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    (out / "config.json").write_text(json.dumps(model_config(), indent=2) + "\n", encoding="ascii")
    (out / "README.md").write_text(readme(arguments.task), encoding="ascii")


if __name__ == "__main__":
    main()
