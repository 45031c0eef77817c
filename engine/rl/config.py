"""The knobs of reinforcement learning, besides those of `isoloss.engine.config`."""

from dataclasses import dataclass, field
from typing import Literal

from isoloss.engine.config import Config, require
from isoloss.parallel import UserError
from isoloss.parallel.normalizer import MODES


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are generated.

    backend: `transformers` runs in the training processes, `sglang` on the servers of rollout.servers.
    num_generations: completions of each prompt. max_new_tokens: of a completion. top_p: 1, as training needs it.
    eval_temperature: of evaluations; null means temperature. eval_top_p: nucleus of evaluations. concurrency:
    completions under way at a time, of each rank (transformers) or in all (sglang). bucket_mb: weights travel to the
    backend in buckets of this size.

    For sglang only: servers: base URLs, such as http://node1:30000. router: base URL of a router that spreads
    generation over them. weight_sync: `broadcast` through a process group with the servers (NCCL, or gloo on CPU),
    `tensor` by handles to memory of the same machine, `disk` through sync_dir. timeout: seconds to wait for a server.
    server_command: starts and restarts a server for each of `servers` here, such as "python -m sglang.launch_server
    --model-path {model} --host {host} --port {port}"; null: somebody else does. colocated: servers share the trainer's
    GPUs and give their memory back while it trains.
    """

    backend: Literal["transformers", "sglang"] = "transformers"
    num_generations: int = 8
    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    eval_temperature: float | None = None
    eval_top_p: float = 1.0
    concurrency: int = 256
    bucket_mb: int = 512
    servers: tuple[str, ...] = ()
    router: str | None = None
    weight_sync: Literal["broadcast", "tensor", "disk"] = "broadcast"
    sync_dir: str | None = None
    timeout: float = 600.0
    server_command: str | None = None
    colocated: bool = False

    def __post_init__(self):
        require(self.num_generations >= 1, "rollout.num_generations", self.num_generations, "must be at least 1")
        require(self.max_new_tokens >= 1, "rollout.max_new_tokens", self.max_new_tokens, "must be at least 1")
        require(
            self.temperature > 0,
            "rollout.temperature",
            self.temperature,
            "must be above 0: greedy completions are all alike and teach nothing",
        )
        require(
            self.top_p == 1,
            "rollout.top_p",
            self.top_p,
            "must be 1: tokens would come from the nucleus while ratio, KL and gradient are of the whole vocabulary, "
            "which is biased; rollout.eval_top_p is for evaluations",
        )
        require(0 < self.eval_top_p <= 1, "rollout.eval_top_p", self.eval_top_p, "must be above 0 and at most 1")
        require(
            self.eval_temperature is None or self.eval_temperature >= 0,
            "rollout.eval_temperature",
            self.eval_temperature,
            "must not be negative (0 is greedy, null the temperature of training)",
        )
        require(self.concurrency >= 1, "rollout.concurrency", self.concurrency, "must be at least 1")
        require(self.bucket_mb >= 1, "rollout.bucket_mb", self.bucket_mb, "must be at least 1")
        require(self.timeout > 0, "rollout.timeout", self.timeout, "must be positive seconds")
        if self.backend == "sglang" and not self.servers:
            raise UserError(
                "rollout.servers=[] must name at least one server, such as http://localhost:30000, with "
                "rollout.backend=sglang"
            )
        urls = [("rollout.servers", url) for url in self.servers]
        for key, url in [*urls, ("rollout.router", self.router)]:
            is_url = url is None or url.startswith(("http://", "https://"))
            require(is_url, key, url, "is not a URL; it must begin with http:// or https://")


@dataclass(frozen=True)
class RewardConfig:
    """function: `package.module:function`, `file.py:function`, or one of the built-in names `exact_match`, `math`,
    `format`; several, with weights, as function=[math, mine.py:style] weights=[1, 0.2]. timeout: seconds for a
    call of a function, after which its worker process is killed (a call is for one completion; in TRL's convention for
    all). workers: processes."""

    function: tuple[str, ...] = ("exact_match",)
    weights: tuple[float, ...] = ()
    timeout: float = 30.0
    workers: int = 2

    def __post_init__(self):
        require(len(self.function) >= 1, "reward.function", list(self.function), "must name at least one function")
        require(
            not self.weights or len(self.weights) == len(self.function),
            "reward.weights",
            list(self.weights),
            f"must be as many as the {len(self.function)} of reward.function, or none",
        )
        require(self.timeout > 0, "reward.timeout", self.timeout, "must be positive seconds")
        require(self.workers >= 1, "reward.workers", self.workers, "must be at least 1")


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is learned from the rewards.

    advantage: `grpo` (group mean and standard deviation), `dr-grpo` (group mean), `rloo` (mean of the others),
    `reinforce++` (return with KL in the reward, whitened over the batch), `reinforce++-baseline` (group mean, whitened
    over the batch), `gae` (with a critic). loss: `clip` (PPO), `gspo`, `cispo`, `reinforce`.
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]. dual_clip: bound of ratio x advantage
    where the advantage is negative, of loss=clip; null: none.

    kl_coef: weight of the KL divergence from the initial policy, 0: none. kl_in: as a term of the loss or taken off
    the reward. kl_estimator: k1, k2 or k3 (at most 10 per token). kl_aggregation, entropy_aggregation: null means
    loss.aggregation (seq-mean-token-sum-norm, where that is another, divides by rollout.max_new_tokens). entropy_coef:
    weight of the entropy bonus. reference_offload: the initial policy's weights wait in CPU memory.

    old_logprobs: the policy that the ratio starts from: `train` (computed before the first mini-batch) or `rollout` (as
    the backend told). importance: correction for the difference of the two, `token` or `sequence`, truncated at
    importance_cap.

    minibatches, epochs: optimizer steps of a generated batch are minibatches x epochs.
    dynamic_sampling: groups whose rewards are all alike are dropped and others drawn, for at most max_draws rounds;
    on_shortage: then an `error`, or go on with a `smaller` batch (in as many equal mini-batches as it can be cut into).
    mask_truncated: completions that met max_new_tokens teach nothing. overlong_buffer, overlong_penalty: the last
    overlong_buffer tokens before max_new_tokens cost a linearly growing part of the penalty.
    gamma, gae_lambda: of returns and advantages over tokens. value_clip: of the critic's change; null: none.
    critic_lr: the critic's learning rate; the rest of its optimizer is the policy's.
    """

    advantage: Literal["grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "gae"] = "grpo"
    loss: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    kl_coef: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_aggregation: str | None = None
    entropy_coef: float = 0.0
    entropy_aggregation: str | None = None
    reference_offload: bool = False
    old_logprobs: Literal["train", "rollout"] = "train"
    importance: Literal["none", "token", "sequence"] = "none"
    importance_cap: float = 2.0
    minibatches: int = 1
    epochs: int = 1
    dynamic_sampling: bool = False
    max_draws: int = 10
    on_shortage: Literal["error", "smaller"] = "error"
    mask_truncated: bool = False
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    gamma: float = 1.0
    gae_lambda: float = 1.0
    value_clip: float | None = 0.2
    critic_lr: float = 1e-5

    def __post_init__(self):
        for name in ("clip_low", "clip_high", "kl_coef", "entropy_coef", "overlong_buffer", "overlong_penalty"):
            require(getattr(self, name) >= 0, f"algorithm.{name}", getattr(self, name), "must not be negative")
        for name in ("minibatches", "epochs", "max_draws"):
            require(getattr(self, name) >= 1, f"algorithm.{name}", getattr(self, name), "must be at least 1")
        for name in ("gamma", "gae_lambda"):
            require(0 <= getattr(self, name) <= 1, f"algorithm.{name}", getattr(self, name), "must be in [0, 1]")
        require(self.clip_low < 1 or self.loss == "cispo", "algorithm.clip_low", self.clip_low, "must be below 1")
        require(
            self.dual_clip is None or self.dual_clip > 1,
            "algorithm.dual_clip",
            self.dual_clip,
            "must be above 1 (null switches it off)",
        )
        require(
            self.dual_clip in (None, 3.0) or self.loss == "clip",  # the default, which the other losses do not read
            "algorithm.dual_clip",
            self.dual_clip,
            f"goes with algorithm.loss=clip (it is {self.loss}); set it to null",
        )
        require(self.importance_cap > 0, "algorithm.importance_cap", self.importance_cap, "must be positive")
        require(
            self.value_clip is None or self.value_clip > 0,
            "algorithm.value_clip",
            self.value_clip,
            "must be positive (null switches it off)",
        )
        require(self.critic_lr >= 0, "algorithm.critic_lr", self.critic_lr, "must not be negative")
        for name in ("kl_aggregation", "entropy_aggregation"):
            mode = getattr(self, name)
            require(mode is None or mode in MODES, f"algorithm.{name}", mode, f"is not one of {', '.join(MODES)}")
        if self.importance != "none" and self.old_logprobs == "rollout" and self.loss != "reinforce":
            raise UserError(
                f"algorithm.importance={self.importance} with algorithm.old_logprobs=rollout would count the "
                "difference twice: the ratio starts from the rollout's probabilities already; set importance=none, or "
                "old_logprobs=train"
            )

    @property
    def uses_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def uses_critic(self) -> bool:
        return self.advantage == "gae"


@dataclass(frozen=True)
class RLConfig(Config):
    """A whole reinforcement learning run. batch.global_size counts prompts, and train.steps optimizer steps."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self):
        sequences = self.batch.global_size * self.rollout.num_generations
        require(
            sequences % self.algorithm.minibatches == 0,
            "algorithm.minibatches",
            self.algorithm.minibatches,
            f"does not divide the {sequences} completions of a batch (batch.global_size={self.batch.global_size} x "
            f"rollout.num_generations={self.rollout.num_generations})",
        )
        grouped = self.algorithm.advantage in ("grpo", "dr-grpo", "rloo", "reinforce++-baseline")
        comparing = f"advantage={self.algorithm.advantage}" if grouped else "dynamic_sampling=true"
        require(
            self.rollout.num_generations > 1 or not (grouped or self.algorithm.dynamic_sampling),
            "rollout.num_generations",
            self.rollout.num_generations,
            f"must be at least 2: algorithm.{comparing} compares completions of a prompt",
        )
        require(
            self.algorithm.overlong_buffer <= self.rollout.max_new_tokens,
            "algorithm.overlong_buffer",
            self.algorithm.overlong_buffer,
            f"is more than rollout.max_new_tokens={self.rollout.max_new_tokens}",
        )
        require(
            self.algorithm.loss != "gspo" or self.loss.aggregation == "seq-mean-token-mean",
            "loss.aggregation",
            self.loss.aggregation,
            "is not GSPO's: its ratio is one number a sequence, which other aggregations count once a token; set "
            "loss.aggregation=seq-mean-token-mean (algorithm.loss=gspo)",
        )
        if self.data.overlong == "truncate":
            raise UserError("data.overlong='truncate' would ask another question; choose error or drop")

    @property
    def eval_temperature(self) -> float:
        chosen = self.rollout.eval_temperature
        return self.rollout.temperature if chosen is None else chosen

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that one generated batch feeds."""
        return self.algorithm.minibatches * self.algorithm.epochs

    def identity(self) -> dict[str, object]:
        """As `Config.identity`: also what decides the completions and rewards of a batch, its optimizer steps, and what
        is stored with its samples. Knobs of the loss alone, such as clip_low, may change as optim.lr may."""
        rollout, algorithm, reward = self.rollout, self.algorithm, self.reward
        return super().identity() | {
            "rollout.num_generations": rollout.num_generations,
            "rollout.max_new_tokens": rollout.max_new_tokens,
            "rollout.temperature": rollout.temperature,
            "reward.function": list(reward.function),
            "reward.weights": list(reward.weights),
            "algorithm.advantage": algorithm.advantage,
            "algorithm.minibatches": algorithm.minibatches,
            "algorithm.epochs": algorithm.epochs,
            "algorithm.old_logprobs": algorithm.old_logprobs,
            "algorithm.dynamic_sampling": algorithm.dynamic_sampling,
            "algorithm.kl_in": algorithm.kl_in,
            "use of algorithm.kl_coef (above 0)": algorithm.uses_reference,
        }
