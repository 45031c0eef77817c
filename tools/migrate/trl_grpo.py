"""TRL's GRPOConfig, in our keys. Names and defaults: trl/trainer/grpo_config.py; the loss: compute_loss in
trl/trainer/grpo_trainer.py, whose num_items_in_batch is counted once for a generated batch.
"""

import dataclasses
from typing import Any

from isoloss.tools.migrate import trl_common
from isoloss.tools.migrate.denominator import Denominator
from isoloss.tools.migrate.releases import Sizes
from isoloss.tools.migrate.table import UNSET, Settings, Source, changes, none, to
from isoloss.tools.migrate.trl_common import processes, window

PROMPT = 2048  # tokens that a prompt may have where TRL sets no limit
PUNISHMENT = "get_soft_overlong_punishment"
OWN_LOSSES = ("sapo", "luspo", "vespo")
# TRL's own reward functions, and ours that do the same.
REWARDS = {"accuracy_reward": "math", "think_format_reward": "format"}
AGGREGATIONS = {"grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "bnpo": "token-mean",
                "dr_grpo": "seq-mean-token-sum-norm", "dapo": "token-mean", "cispo": "token-mean",
                "vespo": "token-mean", "luspo": "seq-mean-token-sum"}  # fmt: skip


def generated(s: Settings) -> int:
    """Completions in a generated batch."""
    if s.has("generation_batch_size"):
        return s.integer("generation_batch_size")
    steps = s.optional("steps_per_generation") or s.integer("gradient_accumulation_steps")
    return s.integer("per_device_train_batch_size") * processes(s) * steps


def prompts(s: Settings) -> int:
    completions, group = generated(s), s.integer("num_generations")
    if group < 1 or completions % group:
        raise s.refusal("num_generations", f"must divide the {completions} completions of a generated batch, "
                        f"{_with_processes(s, group)}")  # fmt: skip
    return completions // group


def _with_processes(s: Settings, group: int) -> str:
    """How many processes there were, and the nearest number that would fit."""
    now, each = processes(s), generated(dataclasses.replace(s, given={**s.given, "processes": 1}))
    fits = [count for count in range(1, 2 * now + group) if count * each % group == 0] if group > 0 else []
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


def mode(s: Settings) -> str:
    name = s.text("loss_type")
    if name not in AGGREGATIONS:
        raise s.refusal("loss_type", f"is none of {', '.join(AGGREGATIONS)}")
    return name


def sequence_ratio(s: Settings) -> bool:
    return s.text("importance_sampling_level") == "sequence"


def aggregation(s: Settings) -> str:
    return "seq-mean-token-mean" if policy(s) == "gspo" else AGGREGATIONS[mode(s)]


def policy(s: Settings) -> str:
    name = mode(s)
    if name in OWN_LOSSES:
        return f"losses.py:{name}"
    return "cispo" if name == "cispo" else "gspo" if sequence_ratio(s) else "clip"


def lost_policy(s: Settings) -> str | None:
    return f"isoloss has no such loss: write one, {policy(s)} (docs/rl.md)" if mode(s) in OWN_LOSSES else None


def scaled(s: Settings) -> str:
    return {"true": "group", "false": "none"}.get(s.text("scale_rewards").lower(), s.text("scale_rewards"))


def advantage(s: Settings) -> str:
    return {"group": "grpo", "none": "dr-grpo"}.get(scaled(s), f"advantages.py:scaled_by_{scaled(s)}")


def lost_advantage(s: Settings) -> str | None:
    known = scaled(s) in ("group", "none")
    return None if known else f"isoloss has no such advantage: write one, {advantage(s)} (docs/rl.md)"


def clip_high(s: Settings) -> float:
    high = s.number("epsilon_high") if s.has("epsilon_high") else s.number("epsilon")
    return high - 1 if mode(s) == "cispo" else high  # there it is the largest ratio itself


def clip_low(s: Settings) -> float:
    return 1.0 if mode(s) == "cispo" else s.number("epsilon")  # there a ratio may be as small as 0


def dual_clip(s: Settings) -> Any:
    return (s.number("delta") if s.has("delta") else None) if policy(s) == "clip" else UNSET


def vllm_mode(s: Settings) -> str | None:
    """How samples of vLLM are corrected for."""
    used = s.flag("use_vllm") and s.flag("vllm_importance_sampling_correction")
    return s.text("vllm_importance_sampling_mode") if used else None


def importance(s: Settings) -> str:
    return {"token_truncate": "token", "sequence_truncate": "sequence"}.get(vllm_mode(s) or "", "none")


def lost_vllm(s: Settings) -> str | None:
    if not s.flag("use_vllm"):
        return None
    return "isoloss generates in process, or on SGLang servers (rollout.backend=sglang, rollout.servers)"


def lost_mode(s: Settings) -> str | None:
    masks = (vllm_mode(s) or "").endswith("mask")
    return "it drops large ratios, isoloss truncates them: algorithm.importance" if masks else None


def lost_sampling(key: str, *whole: Any):
    def lost(s: Settings) -> str | None:
        rest = "isoloss trains on samples of the whole vocabulary only: others would bias ratio, KL and gradient"
        return None if s(key) in whole else rest

    return lost


def lost_rewards(s: Settings) -> str | None:
    """A bare name that is not TRL's stands for a function of the user's own script, whatever ours are called."""
    own = [name for name in s.texts("reward_funcs") if name not in REWARDS and name != PUNISHMENT and "." not in name]
    return f"{', '.join(own)} of your own code: reward.function=[file.py:function, ...], all of them" if own else None


def rewards(s: Settings) -> list[tuple[str, float]]:
    """TRL's functions with their weights, which are 1 by default."""
    named, weights = s.texts("reward_funcs"), s("reward_weights")
    weights = weights if isinstance(weights, list) else [1.0] * len(named)
    if len(weights) != len(named):
        raise s.refusal("reward_weights", f"must be one for each of the {len(named)} reward_funcs")
    return list(zip(named, map(float, weights)))


def reward(s: Settings) -> Any:
    if lost_rewards(s):
        return UNSET
    named = [name for name, _ in rewards(s) if name != PUNISHMENT]
    return [REWARDS.get(name) or ":".join(name.rsplit(".", 1)) for name in named] or UNSET


def reward_weights(s: Settings) -> Any:
    if not s.has("reward_weights") or lost_rewards(s):
        return UNSET
    return [weight for name, weight in rewards(s) if name != PUNISHMENT] or UNSET


def overlong(s: Settings) -> tuple[int, Any]:
    """TRL's soft punishment is a reward function: its size, and its weight."""
    found = [weight for name, weight in rewards(s) if name == PUNISHMENT]
    return (256, found[0]) if found else (0, UNSET)


def loss(s: Settings) -> tuple[Denominator, list[str]]:
    name, told = mode(s), []
    steps = minibatches(s)
    scope = "micro-batch" if name == "bnpo" else "step"
    if name in ("dapo", "cispo", "vespo") and steps > 1:
        scope = "generated batch"
    if s.has("entropy_coef") and s.number("entropy_coef") and name not in ("dapo", "cispo", "vespo"):
        told.append("the entropy bonus is a mean over the tokens of a micro-batch, averaged over micro-batches: "
                    "algorithm.entropy_aggregation=token-mean is its mean over the step")  # fmt: skip
    if advantage(s) == "grpo":
        told.append("TRL adds 1e-4 to a group's standard deviation, isoloss 1e-6")
    if s.number("beta"):
        told.append("TRL's KL estimate has no limit per token; ours is at most 10")
    return Denominator(
        AGGREGATIONS[name],
        scope=scope,
        length=s.integer("max_completion_length") if name == "dr_grpo" else None,
        count_fully_masked=AGGREGATIONS[name].startswith("seq"),
        steps=steps if scope == "generated batch" else 1,
        own_loss=name in OWN_LOSSES,
    ), told


def past(s: Settings) -> tuple[Sizes, list[str]]:
    by_tokens = mode(s) in ("dapo", "cispo", "vespo")
    kinds = {
        "bnpo": mode(s) == "bnpo",
        "generated": by_tokens and minibatches(s) > 1,
        "truncated": by_tokens and s.flag("mask_truncated_completions"),
    }
    ranks = processes(s) if s.has("processes") else None
    sizes = Sizes(ranks, s.integer("gradient_accumulation_steps"), window(s) if ranks else None, minibatches(s))
    return sizes, [kind for kind, is_so in kinds.items() if is_so]


def before(s: Settings) -> list[str]:
    told = trl_common.before(s)
    if not s.has("max_prompt_length"):
        told.append(f"data.max_length: TRL has no limit for prompts; it is max_completion_length and {PROMPT} for "
                    "the prompt")  # fmt: skip
    if not s.has("reward_funcs"):
        told.append(
            "reward.function: TRL takes functions in Python; name yours as file.py:function, in TRL's convention"
        )
    return told


KEYS = {
    **trl_common.KEYS,
    "data.max_length": lambda s: s.integer("max_completion_length") + (s.positive("max_prompt_length") or PROMPT),
    "batch.global_size": prompts,
    "batch.max_tokens": lambda s: s.integer("per_device_train_batch_size") * s.integer("max_completion_length"),
    "loss.aggregation": aggregation,
    "loss.norm_length": lambda s: s.integer("max_completion_length") if mode(s) == "dr_grpo" else UNSET,
    "loss.count_fully_masked": lambda s: aggregation(s).startswith("seq"),
    "rollout.num_generations": lambda s: s.integer("num_generations"),
    "rollout.max_new_tokens": lambda s: s.integer("max_completion_length"),
    "rollout.temperature": lambda s: s.number("temperature"),
    "algorithm.advantage": advantage,
    "algorithm.loss": policy,
    "algorithm.clip_low": clip_low,
    "algorithm.clip_high": clip_high,
    "algorithm.dual_clip": dual_clip,
    "algorithm.kl_coef": lambda s: s.number("beta"),
    "algorithm.entropy_coef": lambda s: s.number("entropy_coef"),
    "algorithm.entropy_aggregation": lambda s: "token-mean" if s.number("entropy_coef") else UNSET,
    "algorithm.importance": importance,
    "algorithm.importance_cap": lambda s: s.number("vllm_importance_sampling_clip_max")
    if importance(s) != "none" else UNSET,
    "algorithm.minibatches": minibatches,
    "algorithm.epochs": lambda s: s.integer("num_iterations"),
    "algorithm.mask_truncated": lambda s: s.flag("mask_truncated_completions"),
    "algorithm.overlong_buffer": lambda s: overlong(s)[0],
    "algorithm.overlong_penalty": lambda s: overlong(s)[1],
    "reward.function": reward,
    "reward.weights": reward_weights,
}  # fmt: skip

OVERRIDDEN = ("learning_rate",)
ROWS = (
    to("learning_rate", "optim.lr optim.min_lr", 1e-6),
    to("num_generations", "rollout.num_generations batch.global_size", 8),
    to("generation_batch_size", "batch.global_size algorithm.minibatches"),
    to("steps_per_generation", "batch.global_size algorithm.minibatches"),
    to("num_iterations", "algorithm.epochs", 1),
    to("max_completion_length", "rollout.max_new_tokens data.max_length loss.norm_length batch.max_tokens", 512),
    to("temperature", "rollout.temperature", 1.0),
    to("top_p", "rollout.top_p", 1.0, lost_sampling("top_p", 1), "result"),
    to("top_k", "rollout.top_p", 0, lost_sampling("top_k", 0, None), "result"),
    to("min_p", "rollout.top_p", None, lost_sampling("min_p", None, 0), "result"),
    to("repetition_penalty", "rollout.top_p", 1.0, lost_sampling("repetition_penalty", 1), "result"),
    to("loss_type", "loss.aggregation loss.norm_length loss.count_fully_masked algorithm.loss", "dapo", lost_policy,
       "give"),
    to("importance_sampling_level", "algorithm.loss loss.aggregation", "token"),
    to("scale_rewards", "algorithm.advantage", "group", lost_advantage, "give"),
    to("beta", "algorithm.kl_coef", 0.0),
    to("epsilon", "algorithm.clip_low algorithm.clip_high|epsilon_high", 0.2),
    to("epsilon_high", "algorithm.clip_high"),
    to("delta", "algorithm.dual_clip"),
    to("entropy_coef", "algorithm.entropy_coef algorithm.entropy_aggregation", 0.0),
    to("mask_truncated_completions", "algorithm.mask_truncated", False),
    to("reward_funcs", "reward.function algorithm.overlong_buffer algorithm.overlong_penalty", None, lost_rewards,
       "give"),
    to("reward_weights", "reward.weights algorithm.overlong_penalty", None, lost_rewards, "give"),
    to("use_vllm", "algorithm.importance", False, lost_vllm),
    to("vllm_importance_sampling_correction", "algorithm.importance", True),
    to("vllm_importance_sampling_mode", "algorithm.importance", "sequence_mask", lost_mode, "result"),
    to("vllm_importance_sampling_clip_max", "algorithm.importance_cap", 3.0),
    to("vllm_importance_sampling_cap", "algorithm.importance_cap"),
    *changes("isoloss truncates importance weights from above only", "vllm_importance_sampling_clip_min",
             when=lambda s: vllm_mode(s) is not None),
    *none("you start SGLang servers and name them in rollout.servers", "vllm_*"),
    *changes("isoloss samples by temperature alone", "generation_kwargs", neutral=({},)),
    *none("isoloss generates by its own code, or on SGLang servers", "cache_implementation", "use_transformers_*",
          "transformers_*", neutral=(None, False)),
    *none("evaluations have one completion per prompt", "num_generations_eval", neutral=(None, 1)),
    *changes("the reward is the weighted sum of the functions; TRL's normalized each first",
             "multi_objective_aggregation", neutral=("sum_then_normalize",)),
    *none("GRPO's denominators are told above", "average_tokens_across_devices"),
    *changes("the initial policy stays the reference", "sync_ref_model"),
    *none("a setting of a reference that moves, which isoloss lacks", "ref_model_*"),
    *changes("isoloss has no such term: write a loss (docs/rl.md)", "top_entropy_quantile", "use_adaptive_entropy",
             "off_policy_mask_threshold", "use_bias_correction_kl", neutral=(1.0,)),
    *none("a setting of what isoloss lacks, so nothing reads it", "sapo_*", "vespo_*", "entropy_coef_*",
          "entropy_target", "reward_model_name_or_path", neutral=(None,)),
    *none("one turn per completion", "max_tool_calling_iterations", neutral=(None,)),
    to("max_prompt_length", "data.max_length", None, lambda s: None if s("max_prompt_length") is None else
       "releases that have it cut prompts to it; isoloss never does: data.max_length counts it, and a longer prompt is "
       "an error, or data.overlong=drop"),
    *(row for row in trl_common.ROWS if row.key not in OVERRIDDEN),
)  # fmt: skip
SOURCE = Source("TRL", ROWS, KEYS, lambda s: "grpo", loss, before, past)
