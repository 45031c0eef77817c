"""Keys of isoloss as functions of slime's arguments.

Names and defaults: slime/utils/arguments.py, and Megatron-LM's for what that leaves alone. The loss: loss_function in
slime/backends/megatron_utils/loss.py, and get_sum_of_sample_mean in cp_utils.py.
"""

from typing import Any

from isoloss.tools.migrate.denominator import Denominator
from isoloss.tools.migrate.table import UNSET, Recipe, Settings

ADVANTAGES = {"grpo": "grpo", "gspo": "grpo", "cispo": "grpo", "reinforce_plus_plus": "reinforce++",
              "reinforce_plus_plus_baseline": "reinforce++-baseline", "ppo": "gae"}  # fmt: skip
ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
PROMPT = 2048  # tokens that a prompt may have where slime sets no limit
LAYOUT = {"--tensor-model-parallel-size": "tp", "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "ring",
          "--expert-model-parallel-size": "ep"}  # fmt: skip
REWARDS = {"math": "math", "deepscaler": "math", "dapo": "math"}


def fine_tunes(s: Settings) -> bool:
    return s.text("--loss-type") == "sft_loss"


def group(s: Settings) -> int:
    return s.integer("--n-samples-per-prompt")


def prompts(s: Settings) -> int:
    if not s.has("--rollout-batch-size"):
        raise s.refusal("--rollout-batch-size", "is missing, and slime has no default for it")
    return s.integer("--rollout-batch-size")


def minibatches(s: Settings) -> int:
    """Optimizer steps of a rollout."""
    if s.has("--num-steps-per-rollout"):
        return s.integer("--num-steps-per-rollout")
    samples = prompts(s) * group(s)
    if not s.has("--global-batch-size"):
        return 1
    if samples % s.integer("--global-batch-size"):
        raise s.refusal("--global-batch-size", f"must divide the {samples} samples of a rollout: isoloss cuts it into "
                        "steps of the same size")  # fmt: skip
    return samples // s.integer("--global-batch-size")


def batch(s: Settings) -> int:
    return prompts(s) * group(s) // minibatches(s) if fine_tunes(s) else prompts(s)


def rl(function: Any):
    """Of reinforcement learning alone."""
    return lambda s: UNSET if fine_tunes(s) else function(s)


def in_steps(key: str, nothing: Any = 0):
    """slime counts rollouts, isoloss optimizer steps."""
    return lambda s: (s.positive(key) or 0) * minibatches(s) or nothing


def longest(s: Settings) -> Any:
    if s.has("--rollout-max-context-len"):
        return s.integer("--rollout-max-context-len")
    if fine_tunes(s):
        return max_tokens(s)
    response = s.positive("--rollout-max-response-len")
    return response + (s.positive("--rollout-max-prompt-len") or PROMPT) if response else UNSET


def max_tokens(s: Settings) -> Any:
    each = s.positive("--max-tokens-per-gpu")
    return each * s.integer("--context-parallel-size") if each and s.flag("--use-dynamic-batch-size") else UNSET


def total_steps(s: Settings) -> int | None:
    rollouts = s.positive("--num-rollout")
    return rollouts * minibatches(s) if rollouts else None


def warmup(s: Settings) -> int:
    if s.has("--lr-warmup-fraction"):
        return int(s.number("--lr-warmup-fraction") * (total_steps(s) or 0))
    return s.integer("--lr-warmup-iters")


def lost_fraction(s: Settings) -> str | None:
    return None if total_steps(s) else "a share of steps whose number is in the data: optim.warmup_steps is it x steps"


def recompute(s: Settings) -> Any:
    granularity = s("--recompute-granularity")
    return granularity if granularity in ("full", "selective") else UNSET


def recompute_layers(s: Settings) -> Any:
    """`block` recomputes the first layers of each stage; `uniform` all of them, some at a time."""
    block = recompute(s) == "full" and s("--recompute-method") == "block"
    return s.integer("--recompute-num-layers") if block else UNSET


def schedule(s: Settings) -> Any:
    style = s.text("--lr-decay-style")
    return style if style in ("constant", "linear", "cosine") else UNSET


def lost_schedule(s: Settings) -> str | None:
    return "isoloss has constant, linear and cosine: give optim.schedule" if schedule(s) is UNSET else None


def expert_tensor(s: Settings) -> int:
    """Megatron-Core's default is the one of the other layers."""
    experts = s.integer("--expert-model-parallel-size") > 1
    given = s.positive("--expert-tensor-parallel-size")
    return given or (s.integer("--tensor-model-parallel-size") if experts else 1)


def estimator(s: Settings) -> str:
    return s.text("--advantage-estimator")


def advantage(s: Settings) -> str:
    named = ADVANTAGES.get(estimator(s))
    if named == "grpo" and s.flag("--disable-rewards-normalization"):
        return "advantages.py:rewards"
    if named == "grpo" and s.flag("--disable-grpo-std-normalization"):
        return "dr-grpo"
    return named or f"advantages.py:{estimator(s)}"


def lost_advantage(s: Settings) -> str | None:
    if estimator(s) not in ADVANTAGES:
        return f"isoloss has no such advantage: write one, {advantage(s)} (docs/rl.md)"
    if ADVANTAGES[estimator(s)] not in ("grpo",) and not s.flag("--normalize-advantages"):
        return f"{advantage(s)} is always whitened over the batch, in slime only with --normalize-advantages"
    return None


def lost_whitening(s: Settings) -> str | None:
    same = ADVANTAGES.get(estimator(s)) != "grpo" or not s.flag("--normalize-advantages")
    return None if same else "isoloss does not whiten what is scaled by the group: write an advantage (docs/rl.md)"


def lost_raw(s: Settings) -> str | None:
    raw = s.flag("--disable-rewards-normalization")
    return (
        "isoloss has no advantage that is the reward itself: write one, advantages.py:rewards (docs/rl.md)"
        if raw
        else None
    )


def policy(s: Settings) -> str:
    if s.text("--loss-type") == "custom_loss":
        return "losses.py:custom"
    return estimator(s) if estimator(s) in ("gspo", "cispo") else "clip"


def lost_loss(s: Settings) -> str | None:
    custom = s.text("--loss-type") == "custom_loss"
    return "rewrite it as a loss of isoloss, losses.py:custom (docs/rl.md)" if custom else None


def kl(s: Settings) -> tuple[float, str]:
    """Coefficient, and where. The estimators that look at the group alone leave --kl-coef unread."""
    if s.flag("--use-kl-loss"):
        return s.number("--kl-loss-coef"), "loss"
    used = ADVANTAGES.get(estimator(s)) != "grpo"
    return (s.number("--kl-coef"), "reward") if used and s.number("--kl-coef") else (0.0, "loss")


def lost_kl(s: Settings) -> str | None:
    unread = s.number("--kl-coef") and kl(s)[1] == "loss"
    return f"slime itself does not use it with --advantage-estimator {estimator(s)}" if unread else None


def lost_estimator(s: Settings) -> str | None:
    unlimited = s.text("--kl-loss-type") == "k3" and kl(s)[0] > 0
    return "slime's k3 has no limit per token, ours is at most 10 (as its low_var_kl)" if unlimited else None


def lost_top_p(s: Settings) -> str | None:
    whole = s.number("--rollout-top-p") == 1 and s.integer("--rollout-top-k") in (-1, 0)
    return None if whole else "isoloss trains on samples of the whole vocabulary only: others would bias ratio and KL"


def evaluations(s: Settings) -> Any:
    """Pairs of a name and a file."""
    return s.texts("--eval-prompt-data")[1::2] or UNSET


def reward(s: Settings) -> Any:
    return [REWARDS[s.text("--rm-type")]] if s.text("--rm-type") in REWARDS else UNSET


def lost_reward(s: Settings) -> str | None:
    named = s("--rm-type")
    if named == "math":
        return None
    if named in REWARDS:
        return "reward.function=[math] compares final expressions, as it does, but gives 0 or 1 whatever the format"
    return "isoloss has exact_match, math, format, and functions of yours (docs/rewards.md): give reward.function"


def aggregation(s: Settings) -> str:
    tokens = s.flag("--calculate-per-token-loss") and policy(s) != "gspo"
    return "token-mean" if tokens else "seq-mean-token-mean"


def recipe(s: Settings) -> Recipe:
    return "sft" if fine_tunes(s) else "dapo" if s.has("--dynamic-sampling-filter-path") else "grpo"


def loss(s: Settings) -> tuple[Denominator, list[str]]:
    tokens, told = s.flag("--calculate-per-token-loss"), []
    if not tokens:
        told.append("samples that share a rollout (of several turns, or a compacted context) are divided by the "
                    "targets of all of them; a rollout of one sample, as here, by its own")  # fmt: skip
    if s.has("--custom-pg-loss-reducer-function-path"):
        told.append("--custom-pg-loss-reducer-function-path replaces this denominator by its own")
    return Denominator(
        "token-mean" if tokens else "seq-mean-token-mean",
        count_fully_masked=not tokens,
        masked_is_a_token=tokens,
        own_loss=s.text("--loss-type") == "custom_loss" or s.has("--custom-pg-loss-reducer-function-path"),
    ), told


def before(s: Settings) -> list[str]:
    told = []
    if fine_tunes(s):
        if not s.has("--rollout-max-context-len"):
            told.append("data.max_length: slime sets no limit for rows; it is what a micro-batch holds")
        return told
    if not s.has("--rollout-max-context-len", "--rollout-max-prompt-len"):
        told.append(
            f"data.max_length: slime sets no limit for prompts; it is the completion and {PROMPT} tokens for them"
        )
    if reward(s) is UNSET:
        told.append("reward.function: exact_match, math, format, or a function of yours (docs/rewards.md)")
    return told


KEYS = {
    "model.path": lambda s: s("--hf-checkpoint") or UNSET,
    "data.train": lambda s: s.texts("--prompt-data") or UNSET,
    "data.eval": evaluations,
    "data.max_length": longest,
    "data.template_kwargs": lambda s: s("--apply-chat-template-kwargs") or UNSET,
    "batch.global_size": batch,
    "batch.max_tokens": max_tokens,
    **{f"parallel.{ours}": lambda s, flag=flag: s.integer(flag) for flag, ours in LAYOUT.items()},
    "parallel.etp": expert_tensor,
    "loss.aggregation": aggregation,
    "loss.count_fully_masked": lambda s: aggregation(s) == "seq-mean-token-mean",
    "optim.lr": lambda s: s.number("--lr"),
    "optim.min_lr": lambda s: s.number("--min-lr"),
    "optim.warmup_steps": warmup,
    "optim.schedule": schedule,
    "optim.weight_decay": lambda s: s.number("--weight-decay"),
    "optim.betas": lambda s: [s.number("--adam-beta1"), s.number("--adam-beta2")],
    "optim.eps": lambda s: s.number("--adam-eps"),
    "optim.clip": lambda s: s.number("--clip-grad"),
    "memory.recompute": recompute,
    "memory.recompute_layers": recompute_layers,
    "train.steps": lambda s: total_steps(s) or UNSET,
    "train.epochs": lambda s: s.positive("--num-epoch") or UNSET,
    "train.seed": lambda s: s.integer("--seed"),
    "train.precision": lambda s: "bf16",
    "train.eval_every": in_steps("--eval-interval"),
    "checkpoint.every": in_steps("--save-interval"),
    "rollout.num_generations": rl(group),
    "rollout.max_new_tokens": rl(lambda s: s.positive("--rollout-max-response-len") or UNSET),
    "rollout.temperature": rl(lambda s: s.number("--rollout-temperature")),
    "rollout.eval_temperature": rl(lambda s: s.number("--eval-temperature") if s.has("--eval-temperature") else UNSET),
    "rollout.eval_top_p": rl(lambda s: s.number("--eval-top-p") if s.has("--eval-top-p") else UNSET),
    "algorithm.advantage": rl(advantage),
    "algorithm.loss": rl(policy),
    "algorithm.clip_low": rl(lambda s: s.number("--eps-clip")),
    "algorithm.clip_high": rl(lambda s: s.number("--eps-clip-high" if s.has("--eps-clip-high") else "--eps-clip")),
    "algorithm.dual_clip": rl(lambda s: UNSET if policy(s) != "clip" else
                              None if s("--eps-clip-c") is None else s.number("--eps-clip-c")),
    "algorithm.kl_coef": rl(lambda s: kl(s)[0]),
    "algorithm.kl_in": rl(lambda s: kl(s)[1]),
    "algorithm.kl_estimator": rl(lambda s: s.text("--kl-loss-type").replace("low_var_kl", "k3") if kl(s)[0] else UNSET),
    "algorithm.entropy_coef": rl(lambda s: s.number("--entropy-coef")),
    "algorithm.old_logprobs": rl(lambda s: "rollout" if s.flag("--use-rollout-logprobs") else "train"),
    "algorithm.importance": rl(lambda s: "token" if s.flag("--use-tis") else "none"),
    "algorithm.importance_cap": rl(lambda s: s.number("--tis-clip") if s.flag("--use-tis") else UNSET),
    "algorithm.minibatches": rl(minibatches),
    "algorithm.dynamic_sampling": rl(lambda s: s.has("--dynamic-sampling-filter-path")),
    "algorithm.gamma": rl(lambda s: s.number("--gamma")),
    "algorithm.gae_lambda": rl(lambda s: s.number("--lambd")),
    "algorithm.value_clip": rl(lambda s: s.number("--value-clip") if estimator(s) == "ppo" else UNSET),
    "reward.function": rl(reward),
}  # fmt: skip
