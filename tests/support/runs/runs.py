"""What runs of recipes start from and what they leave: a small model from scratch, rows, metrics."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from isoloss.engine.config.schema import Config
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.run.records import read_rows

TINY = Path(str(files("isoloss.recipes") / "assets" / "tiny"))
SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
TIMES = ("seconds", "tokens_per_second", "mfu", "generate_seconds", "train_seconds", "critic_seconds", "sync_seconds")
AnyConfig = TypeVar("AnyConfig", Config, RLConfig)


def copy_tokenizer(folder: Path) -> None:
    """The shipped one, with its chat template."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)


def write_model(folder: Path, num_layers: int) -> Path:
    """config.json and the shipped tokenizer, no weights."""
    folder.mkdir()
    copy_tokenizer(folder)
    config = json.loads((TINY / "config.json").read_text()) | SMALL | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def conversation(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: Sequence[dict | str]) -> Path:
    """A JSON Lines file; a row that is a string is written as it stands."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows_of(path: Path | str) -> list[dict]:
    """Return the rows of a JSON Lines file that nothing writes any more."""
    assert Path(path).read_bytes().endswith(b"\n"), f"{path} ends within a row"
    return list(read_rows(Path(path)))


def metrics_of(config: Config | RLConfig, name: str = "metrics") -> list[dict]:
    """The rows of metrics.jsonl, or of another such file, in the folder of a run."""
    return rows_of(Path(str(config.output_dir), f"{name}.jsonl"))


def numbers(folder: Path | str | None) -> list[dict]:
    """Everything of metrics.jsonl that is not about time."""
    rows = rows_of(Path(str(folder), "metrics.jsonl"))
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def resumed(config: AnyConfig) -> AnyConfig:
    return replace(config, checkpoint=replace(config.checkpoint, resume=True))


def typed(*overrides: str) -> list[str]:
    """As somebody types them: of each key the last one."""
    return list({override.partition("=")[0]: override for override in overrides}.values())
