"""A folder in which recipes of the tinker-cookbook find models and data without a network.

transformers and datasets prefer a folder of that name, relative to where the process runs, to the Hub: so
`Qwen/Qwen3-8B/` has the tokenizer of the served model, `openai/gsm8k/` problems in the form of GSM8K, and so on.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

ASSETS = Path(__file__).parents[3] / "recipes/assets"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
DIGITS = range(10)
ROWS = {"train": 2048, "test": 64}
SUFFIX = " Write your answer in \\boxed{} format."  # of a question of GSM8K in math_rl and rl_basic


def make(folder: Path, model: Path, name: str = "Qwen/Qwen3-8B", second: Sequence[int] = DIGITS) -> Path:
    """Make the folder, with the tokenizer of the model's folder under the name that recipes ask for. Return it.

    second: what the second number of a sum may be.
    """
    tokenizer = folder / name
    tokenizer.mkdir(parents=True, exist_ok=True)
    for file in TOKENIZER_FILES:
        if (model / file).exists():
            shutil.copy(model / file, tokenizer / file)
    for split, count in ROWS.items():
        rng = Random(split)
        questions = short_questions(split)
        sums = [draw_sum(rng, second) for _ in range(count)]
        write(folder / "HuggingFaceH4/no_robots", split, ({"messages": turns(*row)} for row in questions))
        write(folder / "allenai/tulu-3-sft-mixture", split, ({"messages": turns(*row)} for row in questions))
        write(folder / "openai/gsm8k", split, (gsm8k_row(a, b) for a, b in sums))
        write(folder / "zwhe99/DeepMath-103K", split, ({"question": question(a, b)} for a, b in sums))
        write(folder / "Anthropic/hh-rlhf", split, (preference_row(a, b) for a, b in sums))
        write(folder / "prompt_distillation", split, ({"messages": turns(question(a, b), str(a + b))} for a, b in sums))
    # datasets takes the configurations of a folder from its README.
    header = {"configs": [{"config_name": "main", "data_files": [{"split": s, "path": f"{s}.jsonl"} for s in ROWS]}]}
    (folder / "openai/gsm8k/README.md").write_text(f"---\n{json.dumps(header)}\n---\n")
    return folder


def write(folder: Path, split: str, rows: Iterable[Mapping[str, object]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def short_questions(split: str) -> Sequence[tuple[str, str]]:
    """Return questions on Python and their short answers, of the shipped text; those of `test` are in no other."""
    text = (ASSETS / "tiny" / {"train": "train.jsonl", "test": "eval.jsonl"}[split]).read_text()
    rows = [[turn["content"] for turn in json.loads(line)["messages"]] for line in text.splitlines()]
    return [(asked, answer) for asked, answer in rows if len(answer) < 120]


def turns(asked: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def draw_sum(rng: Random, second: Sequence[int]) -> tuple[int, int]:
    return rng.choice(DIGITS), rng.choice(second)


def question(a: int, b: int) -> str:
    return f"What is {a} + {b}?"


def gsm8k_row(a: int, b: int) -> dict[str, str]:
    return {"question": question(a, b), "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}


def preference_row(a: int, b: int) -> dict[str, str]:
    """Return a pair in the form of hh-rlhf: the right answer is preferred to one that is off by ten."""
    asked = f"\n\nHuman: {question(a, b)}\n\nAssistant: "
    return {"chosen": f"{asked}{a + b}", "rejected": f"{asked}{a + b + 10}"}


def boxed_rows(second: Sequence[int], count: int, mistakes: float) -> list[dict[str, object]]:
    """Return sums in the form in which math_rl asks those of GSM8K, answered by somebody who adds ten now and then."""
    rng, rows = Random("boxed"), []
    for _ in range(count):
        a, b = draw_sum(rng, second)
        answer = a + b + 10 * (rng.random() < mistakes)
        rows.append({"messages": turns(f"{question(a, b)}{SUFFIX}", f"\\boxed{{{answer}}}")})
    return rows
