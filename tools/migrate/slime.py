"""slime: a launch script, or the arguments of train.py; reinforcement learning, or supervised fine-tuning.

Names and defaults: slime/utils/arguments.py, and Megatron-LM's for what that leaves alone. The loss: loss_function in
slime/backends/megatron_utils/loss.py, and get_sum_of_sample_mean in cp_utils.py. The table is slime.toml.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isoloss.tools.migrate import columns, reading
from isoloss.tools.migrate.settings import UNSET, Settings
from isoloss.tools.migrate.table import Recipe, Source, load

PROGRAMS = re.compile(r"(^|/)train(_async)?\.py$")
ADVANTAGES = {"grpo": "grpo", "gspo": "grpo", "cispo": "grpo", "reinforce_plus_plus": "reinforce++",
              "reinforce_plus_plus_baseline": "reinforce++-baseline", "ppo": "gae"}  # fmt: skip
PROMPT = 2048  # tokens that a prompt may have where slime sets no limit
REWARDS = {"math": "math", "deepscaler": "math", "dapo": "math"}


def read(path: Path | None, words: Sequence[str]) -> tuple[Source, dict[str, Any], list[str]]:
    """Return the source, the values that the file and the words give, and the parts of a script that were not read."""
    variables, rest = reading.split_variables(words)
    script = reading.script(path, variables)
    given = reading.flags([*reading.arguments_of(script, PROGRAMS), *rest])
    return SLIME, given, script.unread


def fine_tunes(s: Settings) -> bool:
    return s.equals("--loss-type", "sft_loss")


def recipe(s: Settings) -> Recipe:
    return "sft" if fine_tunes(s) else "dapo" if s.has("--dynamic-sampling-filter-path") else "grpo"


# ---- batches and layout ----------------------------------------------------------------------------------------------


def prompts(s: Settings) -> int:
    if not s.has("--rollout-batch-size"):
        raise s.refusal("--rollout-batch-size", "is missing, and slime has no default for it")
    return s.integer("--rollout-batch-size")


def minibatches(s: Settings) -> int:
    """Return the optimizer steps of a rollout."""
    if s.has("--num-steps-per-rollout"):
        return s.integer("--num-steps-per-rollout")
    samples = prompts(s) * s.integer("--n-samples-per-prompt")
    if not s.has("--global-batch-size"):
        return 1
    if samples % s.integer("--global-batch-size"):
        raise s.refusal("--global-batch-size", f"must divide the {samples} samples of a rollout: isoloss cuts it into "
                        "steps of the same size")  # fmt: skip
    return samples // s.integer("--global-batch-size")


def batch(s: Settings) -> int:
    return prompts(s) * s.integer("--n-samples-per-prompt") // minibatches(s) if fine_tunes(s) else prompts(s)


def in_steps(s: Settings, key: str) -> int | None:
    """Return optimizer steps, where slime counts rollouts; None for none."""
    rollouts = s.positive(key)
    return (rollouts * minibatches(s) or None) if rollouts else None


def warmup(s: Settings) -> int:
    if s.has("--lr-warmup-fraction"):
        return int(s.number("--lr-warmup-fraction") * (in_steps(s, "--num-rollout") or 0))
    return s.integer("--lr-warmup-iters")


def max_length(s: Settings) -> Any:
    if s.has("--rollout-max-context-len"):
        return s.integer("--rollout-max-context-len")
    if fine_tunes(s):
        return max_tokens(s)
    response = s.positive("--rollout-max-response-len")
    return response + (s.positive("--rollout-max-prompt-len") or PROMPT) if response else UNSET


def max_tokens(s: Settings) -> Any:
    tokens = s.positive("--max-tokens-per-gpu")
    return tokens * s.integer("--context-parallel-size") if tokens and s.flag("--use-dynamic-batch-size") else UNSET


def evaluations(s: Settings) -> list[str]:
    """Return the files, each of which follows its name."""
    return s.texts("--eval-prompt-data")[1::2]


def expert_tensor(s: Settings) -> int:
    """Return ETP; Megatron-Core's default is TP."""
    experts = s.integer("--expert-model-parallel-size") > 1
    given = s.positive("--expert-tensor-parallel-size")
    return given or (s.integer("--tensor-model-parallel-size") if experts else 1)


def recompute(s: Settings) -> Any:
    granularity = s("--recompute-granularity")
    return granularity if granularity in ("full", "selective") else UNSET


def recompute_layers(s: Settings) -> Any:
    """Return a number for `block`, which recomputes the first layers of each stage; `uniform` recomputes all."""
    block = recompute(s) == "full" and s("--recompute-method") == "block"
    return s.integer("--recompute-num-layers") if block else UNSET


# ---- the algorithm ---------------------------------------------------------------------------------------------------


def estimator(s: Settings) -> str:
    return s.text("--advantage-estimator")


def by_group(s: Settings) -> bool:
    """Return whether an advantage is scaled by its group."""
    return ADVANTAGES.get(estimator(s)) == "grpo"


def advantage(s: Settings) -> str:
    if by_group(s) and s.flag("--disable-rewards-normalization"):
        return "advantages.py:rewards"
    if by_group(s) and s.flag("--disable-grpo-std-normalization"):
        return "dr-grpo"
    return ADVANTAGES.get(estimator(s)) or f"advantages.py:{estimator(s)}"


def lost_advantage(s: Settings) -> str:
    if estimator(s) not in ADVANTAGES:
        return f"isoloss has no such advantage: write one, {advantage(s)} (docs/rl.md)"
    if not by_group(s) and not s.flag("--normalize-advantages"):
        return f"{advantage(s)} is always whitened over the batch, in slime only with --normalize-advantages"
    return ""


def policy(s: Settings) -> str:
    if s.equals("--loss-type", "custom_loss"):
        return "losses.py:custom"
    return estimator(s) if estimator(s) in ("gspo", "cispo") else "clip"


def dual_clip(s: Settings) -> Any:
    if policy(s) != "clip":
        return UNSET
    return None if s("--eps-clip-c") is None else s.number("--eps-clip-c")


def kl(s: Settings, part: str) -> Any:
    """Return `coef` or `in` of the KL. Estimators that look at the group alone do not read --kl-coef."""
    values: dict[str, Any] = {"coef": 0.0, "in": "loss"}
    if s.flag("--use-kl-loss"):
        values["coef"] = s.number("--kl-loss-coef")
    elif not by_group(s) and s.number("--kl-coef"):
        values = {"coef": s.number("--kl-coef"), "in": "reward"}
    return values[part]


def kl_estimator(s: Settings) -> Any:
    return s.text("--kl-loss-type").replace("low_var_kl", "k3") if kl(s, "coef") else UNSET


def reads_kl_coef(s: Settings) -> bool:
    return kl(s, "in") == "reward"


def other_filter(s: Settings, key: str) -> bool:
    return not str(s(key)).endswith(("check_reward_nonzero_std", "None"))


def reward(s: Settings) -> list[str]:
    return [REWARDS[s.text("--rm-type")]] if s.text("--rm-type") in REWARDS else []


def lost_reward(s: Settings) -> str:
    if s("--rm-type") == "math":
        return ""
    if s("--rm-type") in REWARDS:
        return "reward.function=[math] compares final expressions, as it does, but gives 0 or 1 whatever the format"
    return "isoloss has exact_match, math, format, and functions of yours (docs/rewards.md): give reward.function"


# ---- the loss --------------------------------------------------------------------------------------------------------


def gspo_by_token(s: Settings) -> bool:
    return s.flag("--calculate-per-token-loss") and policy(s) == "gspo"


def aggregation(s: Settings) -> str:
    tokens = s.flag("--calculate-per-token-loss") and policy(s) != "gspo"
    return "token-mean" if tokens else "seq-mean-token-mean"


def own_loss(s: Settings) -> bool:
    return s.equals("--loss-type", "custom_loss") or s.has("--custom-pg-loss-reducer-function-path")


def averages_sequences(s: Settings) -> bool:
    return aggregation(s) == "seq-mean-token-mean"


SLIME = load("slime", vars(columns) | globals())
