"""verl: a YAML file, a launch script, or overrides; reinforcement learning (main_ppo) or fine-tuning (sft_trainer).

Names and defaults: verl/trainer/config/*.yaml and sft_trainer_engine.yaml. The losses: agg_loss in
verl/trainer/ppo/core_algos.py and verl/workers/utils/losses.py, with the counts of verl/workers/engine; the older
workers: verl/workers/actor/dp_actor.py. The tables are verl_rl.toml and verl_sft.toml.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isoloss.tools.migrate import columns, reading
from isoloss.tools.migrate.denominator import MODES
from isoloss.tools.migrate.releases import Sizes
from isoloss.tools.migrate.settings import UNSET, Settings
from isoloss.tools.migrate.table import Recipe, Source, load

PROGRAMS = re.compile(r"(verl\.trainer\.\w*|main_ppo\w*|main_dapo|sft_trainer\w*)(\.py)?$")
A, R, CORRECTION = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm.rollout_correction."
BUFFERS = ("reward_model.overlong_buffer.", "reward.reward_kwargs.overlong_buffer_cfg.",
           "reward_model.reward_kwargs.overlong_buffer_cfg.")  # fmt: skip
REWARDS = ("custom_reward_function.", "reward.custom_reward_function.")
ADVANTAGES = {"grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "gae": "gae",
              "reinforce_plus_plus": "reinforce++", "reinforce_plus_plus_baseline": "reinforce++-baseline"}  # fmt: skip
# Inputs of these estimators that an advantage of isoloss does not get.
UNSEEN = {"remax": "the reward of a greedy completion", "opo": "lengths of completions",
          "optimal_token_baseline": "log-probabilities", "tir_optimal_token_baseline": "log-probabilities",
          "gdpo": "the parts of a reward"}  # fmt: skip
LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def read(path: Path | None, words: Sequence[str]) -> tuple[Source, dict[str, Any], list[str]]:
    """Return the source, the values that the file and the words give, and the parts of a script that were not read."""
    choices = frozenset(row.key for row in (*RL.rows, *SFT.rows) if "." not in row.key)
    variables, overrides = reading.split_variables(words, choices)
    if path is not None and path.suffix in (".yaml", ".yml", ".json"):
        given, unread = reading.flattened(reading.mapping(path)), []
    else:
        script = reading.script(path, variables)
        given, unread = reading.assignments(reading.arguments_of(script, PROGRAMS)), script.unread
    given |= reading.assignments(overrides)
    fine_tuning = not any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in given)
    return (SFT if fine_tuning else RL), given, unread


def lora(s: Settings, group: str) -> bool:
    return any(s.named(f"{group}{name}") for name in ("lora_rank", "lora.rank", "lora_adapter_path"))


def mtp(s: Settings, group: str) -> bool:
    """Return whether the loss of multi-token prediction is trained. Drafts for rollouts alone change no loss."""
    return all(s.on(f"{group}mtp.{name}") for name in ("enable", "enable_train"))


def min_lr(s: Settings, group: str) -> float:
    if s.has(f"{group}min_lr"):
        return s.number(f"{group}min_lr")
    return s.number(f"{group}lr") * (s.number(f"{group}min_lr_ratio") if s(f"{group}min_lr_ratio") else 0)


def warmup(s: Settings, group: str) -> int:
    """Return the steps of verl's scheduler. Without the length of the run a share of it cannot be known."""
    if given := s.positive(f"{group}lr_warmup_steps"):
        return given
    return int((s.positive("trainer.total_training_steps") or 0) * s.number(f"{group}lr_warmup_steps_ratio"))


# ---- fine-tuning -----------------------------------------------------------------------------------------------------


def sft_max_tokens(s: Settings) -> int:
    shared = s.integer("engine.ulysses_sequence_parallel_size") * (s.positive("engine.context_parallel_size") or 1)
    if s.flag("data.use_dynamic_bsz"):
        return s.integer("data.max_token_len_per_gpu") * shared
    return s.integer("data.micro_batch_size_per_gpu") * s.integer("data.max_length")


def sft_recompute(s: Settings) -> Any:
    if "megatron" in (s.named("engine"), s.named("engine.strategy"), s.named("engine.name")):
        granularity = s.named("engine.override_transformer_config.recompute_granularity")
        return granularity if granularity in ("full", "selective") else UNSET
    return "full" if s.flag("model.enable_gradient_checkpointing") else UNSET


# ---- reinforcement learning ------------------------------------------------------------------------------------------


def minibatches(s: Settings) -> int:
    prompts, part = s.integer("data.train_batch_size"), s.integer(f"{A}ppo_mini_batch_size")
    if part < 1 or prompts % part:
        raise s.refusal(f"{A}ppo_mini_batch_size", f"must divide data.train_batch_size={prompts}: isoloss cuts a "
                        "generated batch into steps of the same size")  # fmt: skip
    return prompts // part


def steps_per_batch(s: Settings) -> int:
    return minibatches(s) * s.integer(f"{A}ppo_epochs")


def in_steps(s: Settings, key: str) -> int | None:
    """Return optimizer steps, where verl counts generated batches; None for none."""
    return (s.positive(key) or 0) * steps_per_batch(s) or None


def rl_warmup(s: Settings) -> int:
    """Return optimizer steps: verl's scheduler takes one of its own for each generated batch."""
    steps = warmup(s, f"{A}optim.")
    return steps * steps_per_batch(s) if steps else 0


def max_length(s: Settings) -> int:
    return s.integer("data.max_prompt_length") + s.integer("data.max_response_length")


def ulysses(s: Settings) -> int:
    return s.integer(f"{A}ulysses_sequence_parallel_size", f"{A}fsdp_config.ulysses_sequence_parallel_size")


def context(s: Settings) -> int:
    """Return the number of ranks that share a sequence."""
    return ulysses(s) * (s.positive(f"{A}megatron.context_parallel_size") or 1)


def max_tokens(s: Settings) -> Any:
    if s.flag(f"{A}use_dynamic_bsz"):
        return s.integer(f"{A}ppo_max_token_len_per_gpu") * context(s)
    micro = s(f"{A}ppo_micro_batch_size_per_gpu", f"{A}ppo_micro_batch_size")
    return UNSET if micro is None else int(micro) * max_length(s)


def expert_tensor(s: Settings) -> int:
    """Return ETP. verl leaves it to Megatron-Core, whose default is TP."""
    experts = s.integer(f"{A}megatron.expert_model_parallel_size") > 1
    given = s.positive(f"{A}megatron.expert_tensor_parallel_size")
    return given or (s.integer(f"{A}megatron.tensor_model_parallel_size") if experts else 1)


def megatron(s: Settings) -> bool:
    """Return whether verl trains with Megatron rather than the model of Hugging Face."""
    keys = any(key.startswith(f"{A}megatron.") for key in s.given)
    return keys or "megatron" in (s(f"{A}strategy"), s("model_engine"))


def recompute(s: Settings) -> Any:
    if megatron(s):
        granularity = s(f"{A}megatron.override_transformer_config.recompute_granularity")
        return granularity if granularity in ("full", "selective") else UNSET
    return "full" if s.flag("actor_rollout_ref.model.enable_gradient_checkpointing") else UNSET


def recompute_layers(s: Settings) -> Any:
    """Return a number for `block`, which recomputes the first layers of each stage; `uniform` recomputes all."""
    group = f"{A}megatron.override_transformer_config.recompute_"
    return s.integer(f"{group}num_layers") if recompute(s) == "full" and s(f"{group}method") == "block" else UNSET


def agent(s: Settings) -> bool:
    """Return whether a completion has turns, or comes from a function of the user's own."""
    own = s.named(f"{R}agent.default_agent_loop") not in (None, "single_turn_agent")
    return s.on(f"{R}multi_turn.enable") or own or s.has(f"{R}agent.agent_loop_config_path")


def eval_temperature(s: Settings) -> float:
    return s.number(f"{R}val_kwargs.temperature") * s.flag(f"{R}val_kwargs.do_sample")


def advantage(s: Settings) -> str:
    name = s.text("algorithm.adv_estimator")
    if ADVANTAGES.get(name) == "grpo" and not s.flag("algorithm.norm_adv_by_std_in_grpo"):
        return "dr-grpo"
    return ADVANTAGES.get(name, f"advantages.py:{name}")


def unknown_advantage(s: Settings) -> bool:
    name = s.text("algorithm.adv_estimator")
    if name in UNSEEN:
        raise s.refusal("algorithm.adv_estimator", f"has no counterpart: an advantage of isoloss is not given "
                        f"{UNSEEN[name]}")  # fmt: skip
    return name not in ADVANTAGES


def policy(s: Settings) -> str:
    name = s.text(f"{A}policy_loss.loss_mode")
    return LOSSES.get(name, f"losses.py:{name}")


def clip(s: Settings, side: str) -> float:
    """Return a side of the clip range. verl reads clip_ratio only where a side is null, and by default neither is."""
    key = f"{A}clip_ratio_{side}"
    return s.number(key if s(key) is not None else f"{A}clip_ratio")


def clip_is_unread(s: Settings) -> bool:
    read = any(s(f"{A}clip_ratio_{side}") is None for side in ("low", "high"))
    return not read and any(clip(s, side) != s.number(f"{A}clip_ratio") for side in ("low", "high"))


def kl(s: Settings, part: str) -> Any:
    """Return a key of algorithm.kl_*: `coef`, `in` or `estimator`."""
    values = {"coef": 0.0, "in": "loss", "estimator": "low_var_kl"}
    if s.flag(f"{A}use_kl_loss"):
        values = {"coef": s.number(f"{A}kl_loss_coef"), "in": "loss", "estimator": s.text(f"{A}kl_loss_type")}
    elif s.flag("algorithm.use_kl_in_reward"):
        values = {"coef": s.number("algorithm.kl_ctrl.kl_coef"), "in": "reward",
                  "estimator": s.text("algorithm.kl_penalty")}  # fmt: skip
    return ESTIMATORS.get(values[part].rstrip("+"), "k3") if part == "estimator" else values[part]


def kl_in_reward(s: Settings) -> bool:
    return s.flag("algorithm.use_kl_in_reward") and not s.flag(f"{A}use_kl_loss")


def lost_estimator(s: Settings, key: str) -> str:
    name = s.text(key)
    if name.endswith("+"):
        return "the value of one estimator with the gradient of another: algorithm.kl_estimator is used for both"
    return "" if name in ESTIMATORS else "isoloss has no such estimator: algorithm.kl_estimator=k3"


def lost_penalty(s: Settings, key: str) -> str:
    return lost_estimator(s, key) if kl_in_reward(s) else "verl itself reads it only with use_kl_in_reward=true"


def bypass(s: Settings) -> bool:
    return s.flag(f"{CORRECTION}bypass_mode")


def importance(s: Settings) -> str:
    level = s(f"{CORRECTION}rollout_is")
    return level if level in ("token", "sequence") and not bypass(s) else "none"


def has_lower_cap(s: Settings) -> bool:
    return "_" in s.text(f"{CORRECTION}rollout_is_threshold")


def cap(s: Settings) -> Any:
    return UNSET if importance(s) == "none" or has_lower_cap(s) else s.number(f"{CORRECTION}rollout_is_threshold")


def overlong(s: Settings, name: str) -> Any:
    """Return the `len` or the `penalty_factor` of the first buffer that is on."""
    for group in BUFFERS:
        if s.has(f"{group}enable") and s.flag(f"{group}enable"):
            return s.integer(f"{group}len") if name == "len" else s.number(f"{group}penalty_factor")
    return 0 if name == "len" else UNSET


def reward(s: Settings) -> list[str]:
    return [f"{s(f'{group}path')}:{s(f'{group}name')}" for group in REWARDS if s.has(f"{group}path")][:1]


def recipe(s: Settings) -> Recipe:
    return "dapo" if s.flag("algorithm.filter_groups.enable") else "grpo"


def aggregation(s: Settings) -> str:
    if s.text(f"{A}policy_loss.loss_mode") in ("gspo", "sapo"):
        return "seq-mean-token-mean"  # whatever loss_agg_mode says
    mode = s.text(f"{A}loss_agg_mode")
    mode = "sum" if mode == "token-sum" else mode
    if mode not in MODES:
        raise s.refusal(f"{A}loss_agg_mode", f"is none of {', '.join(MODES)}, token-sum")
    return mode


def aggregates(s: Settings, prefix: str) -> bool:
    return aggregation(s).startswith(prefix)


def norm_length(s: Settings) -> Any:
    if aggregation(s) != "seq-mean-token-sum-norm":
        return UNSET
    return s.optional(f"{A}loss_scale_factor") or s.integer("data.max_response_length")


def legacy(s: Settings) -> bool:
    """Return whether verl's older workers ran. Their key says so: auto meant them."""
    return s("trainer.use_legacy_worker_impl") in ("auto", "enable")


def own_loss(s: Settings) -> bool:
    return policy(s).startswith("losses.py")


def sizes(s: Settings) -> Sizes:
    micro = s(f"{A}ppo_micro_batch_size_per_gpu", f"{A}ppo_micro_batch_size")
    split = context(s) * (s.positive(f"{A}megatron.tensor_model_parallel_size") or 1)
    split *= s.positive(f"{A}megatron.pipeline_model_parallel_size") or 1
    gpus = s.named("trainer.n_gpus_per_node")
    ranks = int(gpus) * int(s.named("trainer.nnodes") or 1) // split if gpus else None
    sequences = s.integer(f"{A}ppo_mini_batch_size") * s.integer(f"{R}n")
    fixed = micro and not s.flag(f"{A}use_dynamic_bsz")
    count = -(-sequences // (ranks * int(micro))) if ranks and fixed else None
    return Sizes(ranks, count, sequences)


SFT, RL = load("verl_sft", vars(columns) | globals()), load("verl_rl", vars(columns) | globals())
