"""verl's reinforcement learning (verl.trainer.main_ppo): its keys, in ours.

Names and defaults: verl/trainer/config/*.yaml. The loss: verl/trainer/ppo/core_algos.py (agg_loss) and
verl/workers/utils/losses.py, with the counts of verl/workers/engine. Its older workers: verl/workers/actor/dp_actor.py.
"""

from typing import Any

from isoloss.tools.migrate.denominator import MODES, Denominator
from isoloss.tools.migrate.releases import Sizes
from isoloss.tools.migrate.table import UNSET, Recipe, Settings

A, R, C = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "critic."
BUFFERS = ("reward_model.overlong_buffer.", "reward.reward_kwargs.overlong_buffer_cfg.",
           "reward_model.reward_kwargs.overlong_buffer_cfg.")  # fmt: skip
REWARDS = ("custom_reward_function.", "reward.custom_reward_function.")
ADVANTAGES = {"grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "gae": "gae",
              "reinforce_plus_plus": "reinforce++", "reinforce_plus_plus_baseline": "reinforce++-baseline"}  # fmt: skip
# What these look at besides rewards, groups and whether a reward is there.
UNSEEN = {"remax": "the reward of a greedy completion", "opo": "lengths of completions",
          "optimal_token_baseline": "log-probabilities", "tir_optimal_token_baseline": "log-probabilities",
          "gdpo": "the parts of a reward"}  # fmt: skip
LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
LAYOUT = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "expert_model_parallel_size": "ep",
          "virtual_pipeline_model_parallel_size": "vpp", "context_parallel_size": "ring",
          "expert_tensor_parallel_size": "etp"}  # fmt: skip


def minibatches(s: Settings) -> int:
    prompts, part = s.integer("data.train_batch_size"), s.integer(f"{A}ppo_mini_batch_size")
    if part < 1 or prompts % part:
        raise s.refusal(f"{A}ppo_mini_batch_size", f"must divide data.train_batch_size={prompts}: isoloss cuts a "
                        "generated batch into steps of the same size")  # fmt: skip
    return prompts // part


def steps_per_batch(s: Settings) -> int:
    return minibatches(s) * s.integer(f"{A}ppo_epochs")


def in_steps(key: str, nothing: Any = 0):
    """verl counts generated batches, isoloss optimizer steps. nothing: what none, 0 and -1 become."""
    return lambda s: (s.positive(key) or 0) * steps_per_batch(s) or nothing


def response(s: Settings) -> int:
    return s.integer("data.max_response_length")


def context(s: Settings) -> int:
    """Ranks that share a sequence."""
    return ulysses(s) * (s.positive(f"{A}megatron.context_parallel_size") or 1)


def ulysses(s: Settings) -> int:
    return int(s.first(f"{A}ulysses_sequence_parallel_size", f"{A}fsdp_config.ulysses_sequence_parallel_size"))


def max_tokens(s: Settings) -> Any:
    if s.flag(f"{A}use_dynamic_bsz"):
        return s.integer(f"{A}ppo_max_token_len_per_gpu") * context(s)
    micro = s.first(f"{A}ppo_micro_batch_size_per_gpu", f"{A}ppo_micro_batch_size")
    return UNSET if micro is None else int(micro) * (s.integer("data.max_prompt_length") + response(s))


def expert_tensor(s: Settings) -> Any:
    """verl leaves it to Megatron-Core, where it is that of the other layers."""
    given = s.positive(f"{A}megatron.expert_tensor_parallel_size")
    experts = s.integer(f"{A}megatron.expert_model_parallel_size") > 1
    return given or (s.integer(f"{A}megatron.tensor_model_parallel_size") if experts else 1)


def megatron(s: Settings) -> bool:
    """Whether verl trains with Megatron rather than the model of Hugging Face."""
    keys = any(key.startswith(f"{A}megatron.") for key in s.given)
    return keys or "megatron" in (s(f"{A}strategy"), s("model_engine"))


def recompute(s: Settings) -> Any:
    if megatron(s):
        granularity = s(f"{A}megatron.override_transformer_config.recompute_granularity")
        return granularity if granularity in ("full", "selective") else UNSET
    return "full" if s.flag("actor_rollout_ref.model.enable_gradient_checkpointing") else UNSET


def recompute_layers(s: Settings) -> Any:
    """`block` recomputes the first layers of each stage; `uniform` all of them, some at a time."""
    group = f"{A}megatron.override_transformer_config.recompute_"
    return s.integer(f"{group}num_layers") if recompute(s) == "full" and s(f"{group}method") == "block" else UNSET


def lora(s: Settings) -> bool:
    model = "actor_rollout_ref.model."
    return any(s.named(f"{model}{name}") for name in ("lora_rank", "lora.rank", "lora_adapter_path"))


def mtp(s: Settings) -> bool:
    """Whether its loss is trained; drafts for the rollouts alone change nothing that is learned."""
    return all(s.on(f"actor_rollout_ref.model.mtp.{name}") for name in ("enable", "enable_train"))


def distills(s: Settings) -> bool:
    return s.on("distillation.enabled")


def rejects(s: Settings) -> bool:
    return s.has("algorithm.rollout_correction.rollout_rs")


def agent(s: Settings) -> bool:
    """Whether a completion has turns, or comes from a function of the user's own."""
    own = s.named(f"{R}agent.default_agent_loop") not in (None, "single_turn_agent")
    return s.on(f"{R}multi_turn.enable") or own or s.has(f"{R}agent.agent_loop_config_path")


def min_lr(s: Settings) -> float:
    if s.has(f"{A}optim.min_lr"):
        return s.number(f"{A}optim.min_lr")
    return s.number(f"{A}optim.lr") * float(s(f"{A}optim.min_lr_ratio") or 0)


def warmup(s: Settings) -> Any:
    """verl's scheduler takes a step for each generated batch."""
    if (given := s.positive(f"{A}optim.lr_warmup_steps")) is not None:
        return given * steps_per_batch(s)
    total, ratio = s.positive("trainer.total_training_steps"), s.number(f"{A}optim.lr_warmup_steps_ratio")
    return int(ratio * total) * steps_per_batch(s) if total else 0


def lost_ratio(s: Settings) -> str | None:
    if s.number(f"{A}optim.lr_warmup_steps_ratio") and not s.positive("trainer.total_training_steps"):
        return (f"a share of steps whose number is in the data: optim.warmup_steps is it x trainer.total_epochs="
                f"{s.integer('trainer.total_epochs')} x rows / {s.integer('data.train_batch_size')} x "
                f"{steps_per_batch(s)}")  # fmt: skip
    return None


def schedule(s: Settings) -> Any:
    style = s.first(f"{A}optim.lr_scheduler_type", f"{A}optim.lr_decay_style", f"{A}optim.warmup_style")
    return style if style in ("constant", "linear", "cosine") else UNSET


def advantage(s: Settings) -> str:
    name = s.text("algorithm.adv_estimator")
    if ADVANTAGES.get(name) == "grpo" and not s.flag("algorithm.norm_adv_by_std_in_grpo"):
        return "dr-grpo"
    return ADVANTAGES.get(name, f"advantages.py:{name}")


def policy(s: Settings) -> str:
    name = s.text(f"{A}policy_loss.loss_mode")
    return LOSSES.get(name, f"losses.py:{name}")


def lost_advantage(s: Settings) -> str | None:
    named = s.text("algorithm.adv_estimator")
    if named in UNSEEN:
        raise s.refusal("algorithm.adv_estimator", f"has no counterpart: an advantage of isoloss is not given "
                        f"{UNSEEN[named]}")  # fmt: skip
    return None if named in ADVANTAGES else f"isoloss has no such advantage: write one, {advantage(s)} (docs/rl.md)"


def lost_policy(s: Settings) -> str | None:
    named = s.text(f"{A}policy_loss.loss_mode")
    return None if named in LOSSES else f"isoloss has no such loss: write one, {policy(s)} (docs/rl.md)"


def kl(s: Settings) -> tuple[float, str, str]:
    """Coefficient, where, and verl's name of the estimator."""
    if s.flag(f"{A}use_kl_loss"):
        return s.number(f"{A}kl_loss_coef"), "loss", s.text(f"{A}kl_loss_type")
    if s.flag("algorithm.use_kl_in_reward"):
        return s.number("algorithm.kl_ctrl.kl_coef"), "reward", s.text("algorithm.kl_penalty")
    return 0.0, "loss", "low_var_kl"


def lost_kl(key: str):
    def lost(s: Settings) -> str | None:
        name = s.text(key)
        if name.endswith("+"):
            return "the value of one estimator with the gradient of another: algorithm.kl_estimator is used for both"
        return None if name in ESTIMATORS else "isoloss has no such estimator: algorithm.kl_estimator=k3"

    return lost


def aggregation(s: Settings) -> str:
    if s.text(f"{A}policy_loss.loss_mode") in ("gspo", "sapo"):
        return "seq-mean-token-mean"  # whatever loss_agg_mode says
    mode = s.text(f"{A}loss_agg_mode")
    mode = "sum" if mode == "token-sum" else mode
    if mode not in MODES:
        raise s.refusal(f"{A}loss_agg_mode", f"is none of {', '.join(MODES)}, token-sum")
    return mode


def norm_length(s: Settings) -> Any:
    if aggregation(s) != "seq-mean-token-sum-norm":
        return UNSET
    return s.optional(f"{A}loss_scale_factor") or response(s)


def clip(s: Settings, side: str) -> float:
    """verl reads clip_ratio only where a side is null, and neither is by default."""
    key = f"{A}clip_ratio_{side}"
    return s.number(key if s(key) is not None else f"{A}clip_ratio")


def lost_clip(s: Settings) -> str | None:
    read = [side for side in ("low", "high") if s(f"{A}clip_ratio_{side}") is None]
    same = all(clip(s, side) == s.number(f"{A}clip_ratio") for side in ("low", "high"))
    return None if read or same else "verl reads clip_ratio_low and clip_ratio_high instead, which have their values"


def critic(key: str):
    """Of a run with one."""
    return lambda s: s.number(key) if s.text("algorithm.adv_estimator") == "gae" else UNSET


def importance(s: Settings) -> str:
    level = s("algorithm.rollout_correction.rollout_is")
    return level if level in ("token", "sequence") and not bypass(s) else "none"


def bypass(s: Settings) -> bool:
    return s.flag("algorithm.rollout_correction.bypass_mode")


def cap(s: Settings) -> Any:
    key = "algorithm.rollout_correction.rollout_is_threshold"
    return UNSET if importance(s) == "none" or "_" in s.text(key) else s.number(key)


def buffer(name: str, otherwise: float):
    def value(s: Settings) -> Any:
        for group in BUFFERS:
            if s.has(f"{group}enable") and s.flag(f"{group}enable"):
                return s.integer(f"{group}len") if name == "len" else s.number(f"{group}penalty_factor")
        return otherwise

    return value


def reward(s: Settings) -> Any:
    found = [f"{s(f'{group}path')}:{s(f'{group}name')}" for group in REWARDS if s.has(f"{group}path")]
    return found[:1] or UNSET


def recipe(s: Settings) -> Recipe:
    return "dapo" if s.flag("algorithm.filter_groups.enable") else "grpo"


def legacy(s: Settings) -> bool:
    """The workers that verl had besides its engines. Their key says which: auto meant them."""
    return s("trainer.use_legacy_worker_impl") in ("auto", "enable")


def loss(s: Settings) -> tuple[Denominator, list[str]]:
    mode = aggregation(s)
    length, told = norm_length(s), []
    if mode == "seq-mean-token-sum-norm" and s(f"{A}loss_scale_factor") is None:
        told.append("loss_scale_factor=null divides by the width to which the responses are padded; data."
                    f"max_response_length={length} is that only where they are padded to their limit")  # fmt: skip
    if not megatron(s) and s.number(f"{A}optim.weight_decay"):
        told.append("FSDP's AdamW shrinks norms and biases too, isoloss does not (optim.weight_decay)")
    if not legacy(s):
        told.append("releases that have trainer.use_legacy_worker_impl divide within each micro-batch unless it is "
                    "disable: for those add trainer.use_legacy_worker_impl=enable and see")  # fmt: skip
    theirs = Denominator(
        mode,
        scope="sample share" if legacy(s) else "step",
        length=None if length is UNSET else length,
        count_fully_masked=mode.startswith("seq") and not legacy(s),
        own_loss=policy(s).startswith("losses.py"),
    )
    return theirs, told


def past(s: Settings) -> tuple[Sizes, list[str]]:
    mode, micro = aggregation(s), s.first(f"{A}ppo_micro_batch_size_per_gpu", f"{A}ppo_micro_batch_size")
    split = context(s) * (s.positive(f"{A}megatron.tensor_model_parallel_size") or 1)
    split *= s.positive(f"{A}megatron.pipeline_model_parallel_size") or 1
    gpus = s.named("trainer.n_gpus_per_node")
    ranks = int(gpus) * int(s.named("trainer.nnodes") or 1) // split if gpus else None
    sequences = s.integer(f"{A}ppo_mini_batch_size") * s.integer(f"{R}n")
    kinds = {
        "legacy": legacy(s) and mode == "token-mean",
        "seq-mean": mode.startswith("seq-mean") and not legacy(s),
        "norm": mode.endswith("norm"),
        "token-sum": mode == "sum",
        "critic": advantage(s) == "gae" and not legacy(s),
        "distillation": distills(s),
    }
    fixed = micro and not s.flag(f"{A}use_dynamic_bsz")
    count = -(-sequences // (ranks * int(micro))) if ranks and fixed else None
    return Sizes(ranks, count, sequences), [kind for kind, is_so in kinds.items() if is_so]


def before(s: Settings) -> list[str]:
    told = []
    if not any(s.has(f"{group}path") for group in REWARDS):
        told.append("reward.function: verl chose one by the rows' data_source; isoloss takes exact_match, math, format "
                    "or a function of yours, in verl's convention too")  # fmt: skip
    return told


KEYS = {
    "model.path": lambda s: s("actor_rollout_ref.model.path") or UNSET,
    "model.tokenizer": lambda s: s.first("actor_rollout_ref.model.tokenizer_path", "data.tokenizer"),
    "data.train": lambda s: s.texts("data.train_files") or UNSET,
    "data.eval": lambda s: s.texts("data.val_files") or UNSET,
    "data.max_length": lambda s: s.integer("data.max_prompt_length") + response(s),
    "data.overlong": lambda s: "drop" if s.flag("data.filter_overlong_prompts") else "error",
    "data.template_kwargs": lambda s: s("data.apply_chat_template_kwargs") or UNSET,
    "batch.global_size": lambda s: s.integer("data.train_batch_size"),
    "batch.max_tokens": max_tokens,
    **{f"parallel.{ours}": lambda s, name=name: s.positive(f"{A}megatron.{name}") or 1
       for name, ours in LAYOUT.items()},
    "parallel.etp": expert_tensor,
    "parallel.ulysses": ulysses,
    "loss.aggregation": aggregation,
    "loss.norm_length": norm_length,
    "loss.count_fully_masked": lambda s: aggregation(s).startswith("seq") and not legacy(s),
    "optim.lr": lambda s: s.number(f"{A}optim.lr"),
    "optim.min_lr": min_lr,
    "optim.warmup_steps": warmup,
    "optim.schedule": schedule,
    "optim.weight_decay": lambda s: s.number(f"{A}optim.weight_decay"),
    "optim.betas": lambda s: [float(beta) for beta in s(f"{A}optim.betas")],
    "optim.clip": lambda s: float(s.first(f"{A}optim.clip_grad", f"{A}grad_clip")),
    "memory.recompute": recompute,
    "memory.recompute_layers": recompute_layers,
    "train.steps": in_steps("trainer.total_training_steps", UNSET),
    "train.epochs": lambda s: s.integer("trainer.total_epochs"),
    "train.seed": lambda s: s.optional("data.seed") or UNSET,
    "train.precision": lambda s: "bf16",
    "train.eval_every": in_steps("trainer.test_freq"),
    "checkpoint.every": in_steps("trainer.save_freq"),
    "checkpoint.keep": lambda s: s.positive("trainer.max_actor_ckpt_to_keep") or UNSET,
    "rollout.num_generations": lambda s: s.integer(f"{R}n"),
    "rollout.max_new_tokens": response,
    "rollout.temperature": lambda s: s.number(f"{R}temperature"),
    "rollout.eval_temperature": lambda s: s.number(f"{R}val_kwargs.temperature") * s.flag(f"{R}val_kwargs.do_sample"),
    "rollout.eval_top_p": lambda s: s.number(f"{R}val_kwargs.top_p"),
    "algorithm.advantage": advantage,
    "algorithm.loss": policy,
    "algorithm.clip_low": lambda s: clip(s, "low"),
    "algorithm.clip_high": lambda s: clip(s, "high"),
    "algorithm.dual_clip": lambda s: s.number(f"{A}clip_ratio_c") if policy(s) == "clip" else UNSET,
    "algorithm.kl_coef": lambda s: kl(s)[0],
    "algorithm.kl_in": lambda s: kl(s)[1],
    "algorithm.kl_estimator": lambda s: ESTIMATORS.get(kl(s)[2].rstrip("+"), "k3"),
    "algorithm.entropy_coef": lambda s: s.number(f"{A}entropy_coeff"),
    "algorithm.old_logprobs": lambda s: "rollout" if bypass(s) else "train",
    "algorithm.importance": importance,
    "algorithm.importance_cap": cap,
    "algorithm.minibatches": minibatches,
    "algorithm.epochs": lambda s: s.integer(f"{A}ppo_epochs"),
    "algorithm.dynamic_sampling": lambda s: s.flag("algorithm.filter_groups.enable"),
    "algorithm.max_draws": lambda s: s.positive("algorithm.filter_groups.max_num_gen_batches") or UNSET,
    "algorithm.overlong_buffer": buffer("len", 0),
    "algorithm.overlong_penalty": buffer("penalty_factor", UNSET),  # pyright: ignore[reportArgumentType]
    "algorithm.gamma": lambda s: s.number("algorithm.gamma"),
    "algorithm.gae_lambda": lambda s: s.number("algorithm.lam"),
    "algorithm.value_clip": critic(f"{C}cliprange_value"),
    "algorithm.critic_lr": critic(f"{C}optim.lr"),
    "reward.function": reward,
}  # fmt: skip
