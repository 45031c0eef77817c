"""TRL: the YAML or JSON of the arguments of SFTConfig or GRPOConfig, as `trl sft --config` takes it.

Names and defaults: trl/trainer/{base,model,sft,grpo}_config.py, trl/scripts/utils.py and transformers/training_args.py.
The losses: trl/trainer/sft_trainer.py with the count of an accumulated batch of transformers
(Trainer.get_batch_samples), and trl/trainer/grpo_trainer.py, whose num_items_in_batch is counted once for a generated
batch. The tables are trl_common.toml, trl_sft.toml and trl_grpo.toml.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isoloss.parallel import UserError
from isoloss.tools.migrate import columns, reading
from isoloss.tools.migrate.releases import Sizes
from isoloss.tools.migrate.settings import SCHEDULES, UNSET, Settings
from isoloss.tools.migrate.table import Source, load

OURS = {"save_steps": "checkpoint.every", "eval_steps": "train.eval_every"}
PROMPT = 2048  # tokens that a prompt may have where TRL sets no limit
PUNISHMENT = "get_soft_overlong_punishment"
OWN_LOSSES = ("sapo", "luspo", "vespo")
# TRL's own reward functions, and isoloss's that do the same.
REWARDS = {"accuracy_reward": "math", "think_format_reward": "format"}
AGGREGATIONS = {"grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "bnpo": "token-mean",
                "dr_grpo": "seq-mean-token-sum-norm", "dapo": "token-mean", "cispo": "token-mean",
                "vespo": "token-mean", "luspo": "seq-mean-token-sum"}  # fmt: skip


def read(path: Path | None, words: Sequence[str]) -> tuple[Source, dict[str, Any], list[str]]:
    """Return the source, the values that the file and the words give, and an empty list."""
    given = reading.mapping(path) if path is not None else {}
    named = {key.replace("-", "_"): value for key, value in (given | _added(words)).items()}
    only_grpo = {row.key for row in GRPO.rows if "*" not in row.key} - {row.key for row in SFT.rows}
    return (GRPO if only_grpo & named.keys() else SFT), named, []


def _added(words: Sequence[str]) -> dict[str, Any]:
    """Return the values after the file: key=value, or --key value as for `trl sft`."""
    at = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    if alone := [word for word in words[:at] if "=" not in word]:
        raise UserError(f"cannot read {alone[0]!r}; write key=value")
    return reading.assignments(words[:at]) | {
        name.removeprefix("--"): value for name, value in reading.flags(words[at:]).items()
    }


def window(s: Settings) -> int:
    """Return the sequences of an optimizer step, over all processes."""
    sequences = s.integer("per_device_train_batch_size") * s.integer("gradient_accumulation_steps")
    return sequences * s.integer("processes")


def local_dataset(s: Settings) -> bool:
    path = s.text("dataset_name")
    return s.has("dataset_name") and (path.startswith(("/", ".")) or path.endswith((".jsonl", ".parquet")))


def warmup_share(s: Settings) -> Any:
    """Return the warm-up as a share of the run; the share had a name of its own."""
    given = s.number("warmup_steps")
    return given if 0 < given < 1 else s("warmup_ratio")


def warmup(s: Settings) -> int:
    given, share, total = s.number("warmup_steps"), float(warmup_share(s) or 0), s.positive("max_steps")
    return int(given) if given >= 1 else math.ceil(share * total) if total else 0


def run_steps(s: Settings) -> str:
    """Return the optimizer steps of a run whose number of rows is not known, for the user to work out."""
    return f"num_train_epochs={s('num_train_epochs')} x rows / {window(s)}"


def schedule(s: Settings) -> Any:
    name = s.text("lr_scheduler_type").replace("constant_with_warmup", "constant").replace("_with_min_lr", "")
    return name if name in SCHEDULES else UNSET


def min_lr(s: Settings) -> float:
    given = s("lr_scheduler_kwargs") or {}
    return float(given.get("min_lr", s.number("learning_rate") * float(given.get("min_lr_rate", 0))))


def interval(s: Settings, key: str, strategy_key: str) -> Any:
    """Return the optimizer steps between two saves or evaluations; a number below 1 is a share of the run."""
    if s.text(strategy_key) != "steps" or s(key) is None or lost_interval(s, key, strategy_key):
        return UNSET
    given = s.number(key)
    return math.ceil(given * s.integer("max_steps")) if 0 < given < 1 else s.integer(key)


def lost_interval(s: Settings, key: str, strategy_key: str) -> str:
    """isoloss counts steps, and saves and evaluates at the end of a run: one epoch is that."""
    name = s.text(strategy_key)
    if name == "epoch" and (s.number("num_train_epochs") > 1 or s.positive("max_steps")):
        return f"once an epoch, whose number of steps is in the data: {OURS[key]} is rows / {window(s)}"
    if name == "best":
        return f"isoloss keeps no best checkpoint by itself: give {OURS[key]} and checkpoint.keep"
    share = name == "steps" and s(key) is not None and 0 < s.number(key) < 1
    unknown = share and not s.positive("max_steps")
    return f"a share of steps whose number is in the data: {OURS[key]} is it x {run_steps(s)}" if unknown else ""


def epochs(s: Settings) -> int:
    return max(1, math.ceil(s.number("num_train_epochs")))


def part_of_an_epoch(s: Settings) -> bool:
    return not s.number("num_train_epochs").is_integer() and not s.positive("max_steps")


# ---- fine-tuning -----------------------------------------------------------------------------------------------------


def sft_max_tokens(s: Settings) -> Any:
    longest = s.optional("max_length")
    return s.integer("per_device_train_batch_size") * longest if longest else UNSET


def turned_off(s: Settings, key: str) -> bool:
    return s.named(key) is False


def own_sft_loss(s: Settings) -> bool:
    return s("loss_type") not in (None, "nll", "chunked_nll")


# ---- GRPO ------------------------------------------------------------------------------------------------------------


def generated(s: Settings) -> int:
    """Return the completions of a generated batch."""
    if s.has("generation_batch_size"):
        return s.integer("generation_batch_size")
    steps = s.optional("steps_per_generation") or s.integer("gradient_accumulation_steps")
    return s.integer("per_device_train_batch_size") * s.integer("processes") * steps


def prompts(s: Settings) -> int:
    completions, group = generated(s), s.integer("num_generations")
    if group < 1 or completions % group:
        raise s.refusal("num_generations", f"must divide the {completions} completions of a generated batch, "
                        f"{_with_processes(s, group)}")  # fmt: skip
    return completions // group


def _with_processes(s: Settings, group: int) -> str:
    """Return how many processes there were, and the nearest number that would fit."""
    now = s.integer("processes")
    by_process = generated(dataclasses.replace(s, given={**s.given, "processes": 1}))
    fits = [count for count in range(1, 2 * now + group) if count * by_process % group == 0] if group > 0 else []
    nearest = min(fits, key=lambda count: abs(count - now), default=None)
    if s.has("generation_batch_size") or nearest is None:
        return "generation_batch_size" if s.has("generation_batch_size") else "and be at least 1"
    given = f"with processes={now}" if s.has("processes") else "of 1 process, which nobody gave"
    return f"{given}; processes={nearest} would fit"


def minibatches(s: Settings) -> int:
    if generated(s) % window(s):
        raise s.refusal("gradient_accumulation_steps", f"makes steps of {window(s)} completions, which do not divide "
                        f"the {generated(s)} of a generated batch")  # fmt: skip
    return generated(s) // window(s)


def max_length(s: Settings) -> int:
    return s.integer("max_completion_length") + (s.positive("max_prompt_length") or PROMPT)


def max_tokens(s: Settings) -> int:
    return s.integer("per_device_train_batch_size") * s.integer("max_completion_length")


def mode(s: Settings) -> str:
    name = s.text("loss_type")
    if name not in AGGREGATIONS:
        raise s.refusal("loss_type", f"is none of {', '.join(AGGREGATIONS)}")
    return name


def own_loss(s: Settings) -> bool:
    return mode(s) in OWN_LOSSES


def by_tokens(s: Settings) -> bool:
    return mode(s) in ("dapo", "cispo", "vespo")


def aggregation(s: Settings) -> str:
    return "seq-mean-token-mean" if policy(s) == "gspo" else AGGREGATIONS[mode(s)]


def averages_sequences(s: Settings) -> bool:
    return aggregation(s).startswith("seq")


def denominator(s: Settings) -> str:
    return AGGREGATIONS[mode(s)]


def counts_masked(s: Settings) -> bool:
    return denominator(s).startswith("seq")


def policy(s: Settings) -> str:
    if own_loss(s):
        return f"losses.py:{mode(s)}"
    by_sequence = s.equals("importance_sampling_level", "sequence")
    return "cispo" if mode(s) == "cispo" else "gspo" if by_sequence else "clip"


def scaled(s: Settings) -> str:
    return {"true": "group", "false": "none"}.get(s.text("scale_rewards").lower(), s.text("scale_rewards"))


def advantage(s: Settings) -> str:
    return {"group": "grpo", "none": "dr-grpo"}.get(scaled(s), f"advantages.py:scaled_by_{scaled(s)}")


def by_group(s: Settings) -> bool:
    return scaled(s) == "group"


def unknown_advantage(s: Settings) -> bool:
    return scaled(s) not in ("group", "none")


def clip_high(s: Settings) -> float:
    high = s.number("epsilon_high", "epsilon")
    return high - 1 if mode(s) == "cispo" else high  # there it is the largest ratio itself


def clip_low(s: Settings) -> float:
    return 1.0 if mode(s) == "cispo" else s.number("epsilon")  # there a ratio may be as small as 0


def dual_clip(s: Settings) -> Any:
    return (s.number("delta") if s.has("delta") else None) if policy(s) == "clip" else UNSET


def vllm_mode(s: Settings) -> str:
    """Return how samples of vLLM are corrected for; empty where they are not."""
    used = s.flag("use_vllm") and s.flag("vllm_importance_sampling_correction")
    return s.text("vllm_importance_sampling_mode") if used else ""


def masks_ratios(s: Settings) -> bool:
    return vllm_mode(s).endswith("mask")


def importance(s: Settings) -> str:
    return {"token_truncate": "token", "sequence_truncate": "sequence"}.get(vllm_mode(s), "none")


def importance_cap(s: Settings) -> Any:
    return UNSET if importance(s) == "none" else s.number("vllm_importance_sampling_clip_max")


def own_rewards(s: Settings) -> str:
    """Return the bare names that are not TRL's: functions of the user's own script, also if isoloss has such a name."""
    return ", ".join(
        name for name in s.texts("reward_funcs") if name not in REWARDS and name != PUNISHMENT and "." not in name
    )


def rewards(s: Settings) -> list[tuple[str, float]]:
    """Return TRL's functions with their weights, which are 1 by default."""
    named, weights = s.texts("reward_funcs"), s("reward_weights")
    weights = weights if isinstance(weights, list) else [1.0] * len(named)
    if len(weights) != len(named):
        raise s.refusal("reward_weights", f"must be one for each of the {len(named)} reward_funcs")
    return list(zip(named, map(float, weights)))


def reward(s: Settings) -> list[str]:
    if own_rewards(s):
        return []
    return [REWARDS.get(name) or ":".join(name.rsplit(".", 1)) for name, _ in rewards(s) if name != PUNISHMENT]


def reward_weights(s: Settings) -> list[float]:
    if not s.has("reward_weights") or own_rewards(s):
        return []
    return [weight for name, weight in rewards(s) if name != PUNISHMENT]


def overlong_penalty(s: Settings) -> Any:
    """Return the weight of TRL's soft punishment, which is a reward function."""
    return next((weight for name, weight in rewards(s) if name == PUNISHMENT), UNSET)


def overlong_buffer(s: Settings) -> int:
    return 0 if overlong_penalty(s) is UNSET else 256


def scope(s: Settings) -> str:
    if mode(s) == "bnpo":
        return "micro-batch"
    return "generated batch" if by_tokens(s) and minibatches(s) > 1 else "step"


def feeds_several_steps(s: Settings) -> bool:
    return scope(s) == "generated batch"


def sizes(s: Settings) -> Sizes:
    ranks = s.integer("processes") if s.has("processes") else None
    return Sizes(ranks, s.integer("gradient_accumulation_steps"), window(s) if ranks else None, minibatches(s))


SFT, GRPO = load("trl_sft", vars(columns) | globals()), load("trl_grpo", vars(columns) | globals())
