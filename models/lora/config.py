"""Keys of LoRA (arXiv:2106.09685): a product of two low-rank factors is added to frozen matrices."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from isoloss.parallel.runtime.config_key import Keys, key, require

GROUPS = ("all", "attention", "mlp", "experts")


@dataclass(frozen=True)
class LoraConfig(Keys, group="lora"):
    """Adapters of low rank, trained in place of the model's own weights, which stay as they are (docs/lora.md)."""

    rank: int = key(0, "Rank of the adapters; 0: full fine-tuning.", at_least=0)
    alpha: float = key(
        32.0, "What adapters add is multiplied by alpha / rank (lora.scaling), as in PEFT's lora_alpha.", above=0
    )
    scaling: Literal["rank", "sqrt-rank"] = key(
        "rank",
        "rank: multiply by alpha / rank; sqrt-rank: by alpha / sqrt(rank), which is rsLoRA (arXiv:2312.03732).",
    )
    targets: tuple[str, ...] = key(
        ("all",),
        "Matrices that get an adapter: all, attention, mlp (with experts), experts (those that a router chooses), or "
        "names of matrices in the model's files, such as q_proj; lm_head, the output matrix, only by its name.",
    )
    expert_rank: int | None = key(
        None, "Rank of the adapters of experts that a router chooses; null: lora.rank.", at_least=1
    )
    init: str | None = key(
        None,
        "Folder of an adapter, PEFT's or isoloss's, to start from in place of random factors A and B = 0. Rank, alpha, "
        "scaling and targets have to be those of the folder.",
    )
    seed: int | None = key(None, "Seed of the random factors A (B starts at 0); null: train.seed.")

    def __post_init__(self):
        super().__post_init__()
        require(bool(self.targets), "lora.targets", list(self.targets), "must name something: all, or some matrices")
        if self.rank == 0:
            require(
                self.init is None, "lora.init", self.init,
                "is an adapter to start from: set lora.rank to its rank, which adapter_config.json calls r",
            )  # fmt: skip
            # Otherwise a forgotten lora.rank would train the whole model, without a word.
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                require(
                    value == field.default, f"lora.{field.name}", list(value) if field.name == "targets" else value,
                    "is for adapters: set lora.rank, as to 16, or leave it out",
                )  # fmt: skip
        if self.init is not None:
            require(self.seed is None, "lora.seed", self.seed, "is for random factors: leave it out with lora.init")

    def resume_fingerprint(self) -> dict[str, object]:
        """Return the values that a resumed run must not change, by key, as plain values; none without an adapter."""
        fixed = {
            "rank": self.rank, "alpha": self.alpha, "scaling": self.scaling, "targets": list(self.targets),
            "expert_rank": self.expert_rank, "init": self.init, "seed": self.seed,
        }  # fmt: skip
        return {f"lora.{name}": value for name, value in fixed.items()} if self.rank > 0 else {}

    def rank_of(self, *, expert: bool) -> int:
        """Return the rank of an adapter. expert: whether a router chooses what it is part of."""
        return self.expert_rank if expert and self.expert_rank is not None else self.rank

    def scale(self, rank: int) -> float:
        """Return the factor of an adapter's product."""
        return self.alpha / (rank if self.scaling == "rank" else math.sqrt(rank))
