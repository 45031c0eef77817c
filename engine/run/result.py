"""The result of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isoloss.engine.run.records import RunRecords


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    checkpoint: folder of the last checkpoint.
    export: Hugging Face folder; None without checkpoint.export_hf, and where an adapter was trained.
    adapter: PEFT's folder of the adapter that was trained (lora.rank); None without checkpoint.export_hf.
    base: folder or checkpoint of the model that training began with; None for random weights.
    first_eval, last_eval: metrics of the first and last evaluation; empty without data.eval.
    idle: lines about steps that learned nothing, on the rank that prints.
    stopped: whether a callback ended the run before its last step.
    summary: lines that the run ended with.
    """

    output_dir: Path
    checkpoint: Path
    first_eval: Mapping[str, float]
    last_eval: Mapping[str, float]
    idle: Sequence[str] = ()
    stopped: bool = False
    export: Path | None = None
    adapter: Path | None = None
    base: Path | None = None
    summary: Sequence[str] = field(default=(), repr=False)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, one an optimizer step, the steps before a resume included.

        Raises UserError where this rank does not see output_dir.
        """
        return [*RunRecords(self.output_dir).metrics()]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Return the rows of eval.jsonl, one an evaluation. Raises UserError as `metrics` does."""
        return [*RunRecords(self.output_dir).evaluations()]

    def adapter_lines(self) -> list[str]:
        """Return a line about the uses of the adapter; none without one."""
        if self.adapter is None:
            return []
        folder, base = self.adapter, self.base
        if base is None:
            return ["adapter: it is for random weights (model.from_scratch), which no folder holds"]
        return [
            f"adapter: merge it with isoloss-convert merge --hf {base} --adapter {folder} --out DIR; serve it with the "
            f"model {base} and --enable-lora --lora-paths NAME={folder} (SGLang) or --enable-lora --lora-modules "
            f"NAME={folder} (vLLM); train it on with lora.init={folder}"
        ]

    def closing_line(self, what: str, file: str) -> str:
        """Return the last line of a run: its outputs and the next command. what: contents of `file` in the folder."""
        model = f"model for transformers in {self.export}; " if self.export else ""
        adapter = f"adapter for PEFT in {self.adapter}; " if self.adapter else ""
        return (
            f"done: {model}{adapter}checkpoint in {self.checkpoint}; {what} in {self.output_dir}/{file}; "
            f"next: tensorboard --logdir {self.output_dir}/tensorboard"
        )
