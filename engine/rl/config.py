"""Define the keys of reinforcement learning that `isoloss.engine.config.schema` does not have."""

from dataclasses import dataclass, field
from typing import Literal

from isoloss.engine.config.schema import Config, DataConfig
from isoloss.engine.rl.agent_config import AgentConfig, EnvironmentConfig
from isoloss.engine.rl.algorithms import ADVANTAGES, KL_ESTIMATORS, LOSSES, advantage_of, loss_of
from isoloss.parallel import UserError
from isoloss.parallel.aggregation import MODES
from isoloss.parallel.runtime.config_key import Keys, key, require


@dataclass(frozen=True)
class RolloutConfig(Keys, group="rollout"):
    """The generation of completions (docs/rollout.md)."""

    backend: Literal["transformers", "megatron", "sglang"] = key(
        "transformers",
        "What generates: a transformers model inside the training processes, the model that is trained (megatron, "
        "without a copy of it), or the SGLang servers of rollout.servers.",
    )
    num_generations: int = key(8, "Completions of each prompt: its group.", at_least=1)
    max_new_tokens: int = key(1024, "Most tokens of a completion.", at_least=1)
    temperature: float = key(
        1.0,
        "Sampling temperature. The trainer's log-probabilities use it too.",
        above=0,
        refusal="must be above 0: greedy completions are all alike and teach nothing",
    )
    top_p: float = key(
        1.0,
        "Must be 1: training samples from the whole vocabulary. eval_top_p is for evaluations.",
        at_least=1,
        at_most=1,
        refusal="must be 1: tokens would come from the nucleus while ratio, KL and gradient are of the whole "
        "vocabulary, which is biased; rollout.eval_top_p is for evaluations",
    )
    eval_temperature: float | None = key(
        None, "Temperature of evaluations; 0: greedy, null: rollout.temperature.", at_least=0
    )
    eval_top_p: float = key(
        1.0,
        "Evaluations sample from the most likely tokens of this total probability; 1: all.",
        above=0,
        at_most=1,
    )
    max_staleness: int = key(
        0,
        "sglang: largest age of the weights that make a token, in batches that have begun since. 0: on policy, the "
        "trainer waits; from 1 on, prompts of the next batches are generated while the trainer trains.",
        at_least=0,
    )
    over_sample: float = key(
        1.0,
        "sglang: groups generated for a batch, as a multiple of batch.global_size. The first to finish make up the "
        "batch; the others begin the next one, as partial completions.",
        at_least=1,
        at_most=1.5,
        refusal="must be from 1 to 1.5: what a batch leaves over is in the next one, which has to have room for others",
    )
    waves: int = key(
        1,
        "sglang: parts of a batch, in the order of its prompts. Log-probabilities and values of one part are computed "
        "while the next is generated.",
        at_least=1,
    )
    concurrency: int = key(
        256,
        "Completions in progress at a time: per model (transformers, megatron), or on all servers (sglang).",
        at_least=1,
    )
    routing_replay: bool = key(
        False,
        "megatron, sglang: the trainer sends each token to the experts that the backend chose for it (R3), weighted by "
        "its own scores.",
    )
    bucket_mb: int = key(512, "Size of the buckets in which weights travel to the backend, in MiB.", at_least=1)
    servers: tuple[str, ...] = key((), "sglang: base URLs of the servers, such as http://node1:30000.")
    router: str | None = key(
        None, "sglang: base URL of a router that distributes requests over the servers; null: rank 0 does it."
    )
    weight_sync: Literal["broadcast", "tensor", "disk"] = key(
        "broadcast",
        "sglang: how weights travel: through a process group with the servers (NCCL; gloo on CPUs), by handles to "
        "memory of the same machine, or through sync_dir.",
    )
    sync_dir: str | None = key(None, "sglang: folder for weight_sync=disk, visible to trainer and servers.")
    timeout: float = key(600.0, "sglang: seconds to wait for a server.", above=0)
    server_command: str | None = key(
        None,
        'sglang: command that starts, and restarts, each of the servers on this machine, such as "python -m '
        'sglang.launch_server --model-path {model} --host {host} --port {port}"; null: you start the servers yourself.',
    )
    api_key_env: str | None = key(
        None,
        "sglang: name of the environment variable that holds the key which servers and router ask for (SGLang's "
        "--api-key); null: they ask for none.",
    )
    colocated: bool = key(
        False, "sglang: servers share the trainer's GPUs: each side gives its memory back while the other works."
    )

    def __post_init__(self):
        super().__post_init__()
        if self.backend == "sglang" and not self.servers:
            raise UserError(
                "rollout.servers=[] must name at least one server, such as http://localhost:30000, with "
                "rollout.backend=sglang"
            )
        for name, off in (("max_staleness", 0), ("waves", 1)):
            value = getattr(self, name)
            require(
                value == off or self.backend == "sglang",
                f"rollout.{name}",
                value,
                f"needs servers, which generate while the trainer trains; rollout.backend={self.backend} takes turns "
                f"with it: set it to {off}, or use rollout.backend=sglang",
            )
            require(
                value == off or not self.colocated,
                f"rollout.{name}",
                value,
                "needs servers with GPUs of their own, and those of rollout.colocated=true take turns with the "
                f"trainer: set it to {off}, or rollout.colocated=false",
            )
        require(
            not self.routing_replay or self.backend != "transformers",
            "rollout.routing_replay",
            self.routing_replay,
            "needs a backend that says which experts it chose, and rollout.backend=transformers does not: use "
            "rollout.backend=megatron or sglang, or set it to false",
        )
        require(
            self.over_sample == 1 or self.max_staleness > 0,
            "rollout.over_sample",
            self.over_sample,
            "leaves partial completions to the next batch, which rollout.max_staleness=0 forbids: set it to 1, or "
            "rollout.max_staleness to 1 or more",
        )
        require(
            self.over_sample == 1 or self.waves == 1,
            "rollout.over_sample",
            self.over_sample,
            f"takes groups in the order in which they finish, and rollout.waves={self.waves} in that of their prompts: "
            "set one of them to 1",
        )
        urls = [("rollout.servers", url) for url in self.servers]
        for name, url in [*urls, ("rollout.router", self.router)]:
            is_url = url is None or url.startswith(("http://", "https://"))
            require(is_url, name, url, "is not a URL; it must begin with http:// or https://")
        if self.api_key_env is not None and not (self.api_key_env.isascii() and self.api_key_env.isidentifier()):
            raise UserError(  # without the value, which may be the key
                "rollout.api_key_env must be the name of an environment variable that holds the key of the servers, "
                "such as SERVERS_KEY, and what it is set to is no name: export the key in a variable"
            )


@dataclass(frozen=True)
class RewardConfig(Keys, group="reward"):
    """The reward of a completion (docs/rewards.md)."""

    function: tuple[str, ...] = key(
        ("exact_match",),
        "One function or several: exact_match, math, format, file.py:function or package.module:function. The reward "
        "is their weighted sum.",
        required=True,
        refusal="must name at least one function",
    )
    weights: tuple[float, ...] = key((), "A weight for each function; []: 1 for all.")
    timeout: float = key(
        30.0,
        "Seconds that a call may take; then its worker process is killed. A call is for one completion, in TRL's "
        "convention for the whole batch.",
        above=0,
    )
    workers: int = key(2, "Processes that call the functions.", at_least=1)

    def __post_init__(self):
        super().__post_init__()
        require(
            not self.weights or len(self.weights) == len(self.function),
            "reward.weights",
            list(self.weights),
            f"must be as many as the {len(self.function)} of reward.function, or none",
        )


@dataclass(frozen=True)
class AlgorithmConfig(Keys, group="algorithm"):
    """The training of the policy on its rewards (docs/rl.md has the formulas)."""

    advantage: str = key(
        "grpo",
        "How rewards become advantages: by mean and standard deviation of the group (grpo), its mean (dr-grpo), the "
        "mean of the others (rloo), returns whitened over the batch (reinforce++), the group's mean, whitened over the "
        "batch (reinforce++-baseline), a critic (gae: PPO), or a function of yours (docs/rl.md).",
        choices=tuple(ADVANTAGES),
        or_function=True,
    )
    loss: str = key(
        "clip",
        "Loss of the policy: PPO's clipped ratio of each token (clip) or of the sequence (gspo), the clipped ratio as "
        "a constant weight (cispo), no ratio (reinforce), or a function of yours (docs/rl.md).",
        choices=tuple(LOSSES),
        or_function=True,
    )
    clip_low: float = key(0.2, "The ratio is clipped from below to 1 - clip_low.", at_least=0)
    clip_high: float = key(0.2, "The ratio is clipped from above to 1 + clip_high (DAPO: 0.28).", at_least=0)
    dual_clip: float | None = key(
        3.0,
        "With loss=clip: the largest ratio that counts where the advantage is negative; null: no limit.",
        above=1,
    )
    kl_coef: float = key(
        0.0, "Weight of the KL divergence from the initial policy; 0: none, and no reference weights.", at_least=0
    )
    kl_in: Literal["loss", "reward"] = key("loss", "The KL divergence is a term of the loss, or lowers the reward.")
    kl_estimator: str = key(
        "k3",
        "How it is estimated from a token, with d = log(policy / initial policy): d, d^2 / 2, or exp(-d) - 1 + d, at "
        "most 10.",
        choices=tuple(KL_ESTIMATORS),
    )
    kl_aggregation: str | None = key(None, "loss.aggregation of the KL term; null: the same.", choices=MODES)
    entropy_coef: float = key(0.0, "Weight of the entropy bonus in the loss; 0: none.", at_least=0)
    entropy_aggregation: str | None = key(None, "loss.aggregation of the entropy bonus; null: the same.", choices=MODES)
    reference_offload: bool = key(False, "Keep the initial policy's weights in CPU memory while they are not needed.")
    old_logprobs: Literal["train", "rollout"] = key(
        "train",
        "Where the ratio starts: the log-probabilities of the policy that generated, computed by the trainer, or as "
        "the rollout backend reported them.",
    )
    importance: Literal["none", "token", "sequence"] = key(
        "none",
        "Multiply the loss by the trainer's probability over the backend's, of each token or of the whole sequence, at "
        "most importance_cap. With old_logprobs=rollout only for a loss without a ratio.",
    )
    importance_cap: float = key(2.0, "Largest importance weight.", above=0)
    importance_beyond: Literal["truncate", "mask"] = key(
        "truncate", "A weight above importance_cap becomes importance_cap, or 0 (mask)."
    )
    importance_low: float | None = key(
        None,
        "With importance_beyond=mask: a weight below this becomes 0 as well (IcePop); null: none.",
        above=0,
    )
    rejection: Literal["none", "sequence", "geometric"] = key(
        "none",
        "Give a whole trajectory the weight 0 where the product (sequence), or the geometric mean (geometric), of its "
        "tokens' probabilities under the trainer over the backend's is outside rejection_low to rejection_high.",
    )
    rejection_low: float | None = key(None, "With rejection: smallest ratio that is kept; null: any.", above=0)
    rejection_high: float | None = key(None, "With rejection: largest ratio that is kept; null: any.", above=0)
    veto: float | None = key(
        None,
        "Give a whole trajectory the weight 0 where a token's probability under the trainer over the backend's is "
        "below this, such as 1e-4; null: never.",
        above=0,
        below=1,
    )
    rejected: Literal["counted", "removed"] = key(
        "counted",
        "Whether tokens of weight 0 stay in the counts that loss.aggregation divides by (counted), or are no targets "
        "(removed, which takes a pass of log-probabilities before the step).",
    )
    minibatches: int = key(1, "Optimizer steps that a generated batch feeds in one epoch.", at_least=1)
    minibatch_by: Literal["completion", "prompt"] = key(
        "completion",
        "What is dealt to the optimizer steps: single completions, so that those of a prompt are in several steps, or "
        "prompts with all their completions, of which batch.share_prefixes saves more.",
    )
    epochs: int = key(1, "Passes over a generated batch.", at_least=1)
    dynamic_sampling: bool = key(
        False, "Drop groups whose rewards are all equal, and draw other prompts for them (DAPO)."
    )
    max_draws: int = key(10, "With dynamic_sampling: most rounds of drawing for a batch.", at_least=1)
    on_shortage: Literal["error", "smaller"] = key(
        "error",
        "If these rounds do not fill the batch: stop, or continue with a smaller one, cut into as many equal "
        "mini-batches as possible.",
    )
    mask_truncated: bool = key(False, "Mask completions that reached rollout.max_new_tokens out of the loss.")
    overlong_buffer: int = key(
        0,
        "Tokens before rollout.max_new_tokens over which the reward falls linearly, by overlong_penalty at the end "
        "(DAPO); 0: none.",
        at_least=0,
    )
    overlong_penalty: float = key(1.0, "Subtracted from the reward of a completion of full length.", at_least=0)
    credit: Literal["trajectory", "turn"] = key(
        "trajectory",
        "With several turns: all targets of a trajectory get its one advantage, or, with advantage=rloo, those of a "
        "turn the rewards from this turn on, less the mean of the others' whole rewards.",
    )
    gamma: float = key(1.0, "Discount of returns per token, for reinforce++ and gae.", at_least=0, at_most=1)
    gae_lambda: float = key(1.0, "Lambda of generalized advantage estimation.", at_least=0, at_most=1)
    value_clip: float | None = key(
        0.2,
        "With gae: how far the critic's value may move from the old one; null: no limit.",
        above=0,
    )
    critic_lr: float = key(
        1e-5, "With gae: the critic's learning rate, constant. The rest of its optimizer follows optim.", at_least=0
    )

    def __post_init__(self):
        super().__post_init__()
        constant = loss_of(self.loss).constant
        require(self.clip_low < 1 or constant, "algorithm.clip_low", self.clip_low, "must be below 1")
        require(
            self.dual_clip in (None, 3.0) or self.loss == "clip",  # the default, which the other losses do not read
            "algorithm.dual_clip",
            self.dual_clip,
            f"goes with algorithm.loss=clip (it is {self.loss}); set it to null",
        )
        self._check_corrections()
        require(
            self.credit == "trajectory" or self.advantage == "rloo",
            "algorithm.credit",
            self.credit,
            f"needs the baseline of algorithm.advantage=rloo (it is {self.advantage}): set that, or credit=trajectory",
        )
        if self.importance != "none" and self.old_logprobs == "rollout" and loss_of(self.loss).ratio:
            raise UserError(
                f"algorithm.importance={self.importance} with algorithm.old_logprobs=rollout would count the "
                "difference twice: the ratio starts from the rollout's probabilities already; set importance=none, or "
                "old_logprobs=train"
            )

    def _check_corrections(self) -> None:
        """Raise UserError where keys of the mismatch between trainer and backend do not go together."""
        masks = self.importance_beyond == "mask"
        require(
            self.importance != "none" or not masks,
            "algorithm.importance_beyond",
            self.importance_beyond,
            "goes with importance weights: set algorithm.importance=token or sequence",
        )
        require(
            self.importance_low is None or masks,
            "algorithm.importance_low",
            self.importance_low,
            "goes with algorithm.importance_beyond=mask: set that, or importance_low to null",
        )
        require(
            self.importance_low is None or self.importance_low <= self.importance_cap,
            "algorithm.importance_low",
            self.importance_low,
            f"is above algorithm.importance_cap={self.importance_cap}: no weight would be left",
        )
        bounds = {"rejection_low": self.rejection_low, "rejection_high": self.rejection_high}
        given = [name for name, bound in bounds.items() if bound is not None]
        require(
            self.rejection == "none" or bool(given),
            "algorithm.rejection",
            self.rejection,
            "rejects nothing without bounds: set algorithm.rejection_low, algorithm.rejection_high or both",
        )
        for name in given:
            require(
                self.rejection != "none",
                f"algorithm.{name}",
                bounds[name],
                "goes with algorithm.rejection=sequence or geometric: set that, or the bound to null",
            )
        require(
            len(given) < 2 or (self.rejection_low or 0) <= (self.rejection_high or 0),
            "algorithm.rejection_low",
            self.rejection_low,
            f"is above algorithm.rejection_high={self.rejection_high}: every trajectory would be rejected",
        )
        require(
            self.rejected == "counted" or self.rejects,
            "algorithm.rejected",
            self.rejected,
            "removes nothing: it goes with algorithm.importance_beyond=mask, algorithm.rejection or algorithm.veto",
        )
        for name, value, off in (("rejection", self.rejection, "none"), ("veto", self.veto, None)):
            require(
                value == off or self.old_logprobs == "train" or not loss_of(self.loss).may_have_ratio,
                f"algorithm.{name}",
                value,
                "compares the policy that generated with the backend, and algorithm.old_logprobs=rollout takes one for "
                "the other: set old_logprobs=train",
            )
        require(
            self.rejected == "counted" or self.old_logprobs == "train",
            "algorithm.rejected",
            self.rejected,
            "needs weights that are known before the step, and with algorithm.old_logprobs=rollout they are those of "
            "the present policy: set old_logprobs=train, or rejected=counted",
        )

    @property
    def rejects(self) -> bool:
        """Return whether targets may get the weight 0."""
        return self.importance_beyond == "mask" or self.rejection != "none" or self.veto is not None

    @property
    def corrects(self) -> bool:
        """Return whether targets have weights for the mismatch between trainer and backend."""
        return self.importance != "none" or self.rejects

    @property
    def uses_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def uses_critic(self) -> bool:
        return advantage_of(self.advantage).critic


@dataclass(frozen=True)
class RLDataConfig(DataConfig, group="data"):
    """The rows to train on and to evaluate."""

    duplicates: Literal["keep", "drop"] = key(
        "keep",
        "Reinforcement learning: whether a row of data.train stays whose prompt and answer an earlier row has. "
        "data.eval keeps all rows.",
    )


@dataclass(frozen=True)
class RLConfig(Config):
    """A whole reinforcement learning run. batch.global_size counts prompts, and train.steps optimizer steps."""

    data: RLDataConfig = field(default_factory=RLDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)

    def __post_init__(self):
        super().__post_init__()
        program = self.environment.program
        require(
            program is None or self.reward == RewardConfig(),
            "reward.function",
            list(self.reward.function),
            f"and its other keys are not read with environment.program={program}, which gives the reward: take them "
            "out, or call the function there",
        )
        for name, group in (("environment", self.environment), ("agent", self.agent)):
            if program is None and group != type(group)():
                raise UserError(f"keys of {name} are set, and environment.program is null: name a program, or none")
        sequences = self.batch.global_size * self.rollout.num_generations
        require(
            self.algorithm.minibatch_by == "completion" or self.batch.global_size % self.algorithm.minibatches == 0,
            "algorithm.minibatches",
            self.algorithm.minibatches,
            f"does not divide the {self.batch.global_size} prompts of a batch (batch.global_size), which "
            "algorithm.minibatch_by=prompt deals",
        )
        require(
            sequences % self.algorithm.minibatches == 0,
            "algorithm.minibatches",
            self.algorithm.minibatches,
            f"does not divide the {sequences} completions of a batch (batch.global_size={self.batch.global_size} x "
            f"rollout.num_generations={self.rollout.num_generations})",
        )
        compares = advantage_of(self.algorithm.advantage).compares
        comparing = f"advantage={self.algorithm.advantage}" if compares else "dynamic_sampling=true"
        require(
            self.rollout.num_generations > 1 or not (compares or self.algorithm.dynamic_sampling),
            "rollout.num_generations",
            self.rollout.num_generations,
            f"must be at least 2: algorithm.{comparing} compares completions of a prompt",
        )
        require(
            self.algorithm.overlong_buffer <= self.rollout.max_new_tokens,
            "algorithm.overlong_buffer",
            self.algorithm.overlong_buffer,
            f"is more than rollout.max_new_tokens={self.rollout.max_new_tokens}: set it to at most that, such as "
            f"{self.rollout.max_new_tokens // 5}, or raise rollout.max_new_tokens",
        )
        algorithm = self.algorithm
        from_rollout = algorithm.old_logprobs == "rollout" and loss_of(algorithm.loss).may_have_ratio
        require(
            self.rollout.max_staleness == 0 or algorithm.importance != "none" or from_rollout,
            "rollout.max_staleness",
            self.rollout.max_staleness,
            "lets older weights make tokens, and with algorithm.importance=none and algorithm.old_logprobs="
            f"{algorithm.old_logprobs} the loss {algorithm.loss} would take them for the policy's own: set "
            "algorithm.importance=token",
        )
        require(
            self.rollout.backend != "transformers" or self.lora.rank == 0 or self.train.precision != "bf16",
            "rollout.backend",
            self.rollout.backend,
            "generates by merged weights, and bf16 rounds most of what an adapter (lora.rank) adds to them away: set "
            "rollout.backend=megatron or sglang",
        )
        only = loss_of(self.algorithm.loss).aggregation
        require(
            only in (None, self.loss.aggregation),
            "loss.aggregation",
            self.loss.aggregation,
            f"is not that of algorithm.loss={self.algorithm.loss}, whose ratio is one number a sequence, which other "
            f"aggregations count once a token; set loss.aggregation={only}",
        )
        if self.data.overlong == "truncate":
            raise UserError("data.overlong='truncate' would ask another question; choose error or drop")

    @property
    def eval_temperature(self) -> float:
        chosen = self.rollout.eval_temperature
        return self.rollout.temperature if chosen is None else chosen

    @property
    def rewarded_by(self) -> str:
        """Return the key and the name of what gives the rewards."""
        if self.environment.program is not None:
            return f"environment.program={self.environment.program}"
        return f"reward.function=[{', '.join(self.reward.function)}]"

    @property
    def trajectory_tokens(self) -> int:
        """Return the most tokens that the model makes in a trajectory."""
        if self.environment.program is None:
            return self.rollout.max_new_tokens
        return self.agent.max_tokens or self.agent.max_turns * self.rollout.max_new_tokens

    @property
    def steps_per_batch(self) -> int:
        """Return the number of optimizer steps that one generated batch feeds."""
        return self.algorithm.minibatches * self.algorithm.epochs

    @property
    def overlaps_generation(self) -> bool:
        """Return whether completions are generated while the trainer does something else."""
        return self.rollout.max_staleness > 0 or self.rollout.waves > 1

    @property
    def judged_by(self) -> tuple[str, ...]:
        """Return the gradient norm alone: the loss of a policy is always about 0, so that it shows no spike."""
        return ("grad_norm",)

    @property
    def samples_begin_alike(self) -> bool:
        """Return whether a prompt has several completions, which begin with it."""
        return self.rollout.num_generations > 1

    @property
    def trained_models(self) -> int:
        return 1 + self.algorithm.uses_critic

    @property
    def frozen_models(self) -> int:
        return int(self.algorithm.uses_reference and not self.algorithm.reference_offload)

    @property
    def shares_device(self) -> bool:
        return self.rollout.colocated

    @property
    def lends_device_memory(self) -> bool:
        """Return whether servers map weight buckets. Memory of segments that grow goes by file descriptors, which the
        kernel refuses across containers, and whose handles differ between versions of torch."""
        return self.rollout.backend == "sglang" and self.rollout.weight_sync == "tensor"

    @property
    def functions(self) -> dict[str, str]:
        rewards = {f"reward.function[{index}]": name for index, name in enumerate(self.reward.function)}
        return {"algorithm.loss": self.algorithm.loss, "algorithm.advantage": self.algorithm.advantage, **rewards}

    def resume_fingerprint(self) -> dict[str, object]:
        """Return those of `Config`, and the values that decide the completions and rewards of a batch, its optimizer
        steps and the fields of its samples. Keys of the loss alone, such as clip_low, may change as optim.lr may."""
        rollout, algorithm, reward = self.rollout, self.algorithm, self.reward
        return super().resume_fingerprint() | {
            "rollout.num_generations": rollout.num_generations,
            "rollout.max_new_tokens": rollout.max_new_tokens,
            "rollout.temperature": rollout.temperature,
            "rollout.max_staleness": rollout.max_staleness,
            "rollout.over_sample": rollout.over_sample,
            "rollout.waves": rollout.waves,
            "environment.program": self.environment.program,
            "agent.history": self.agent.history,
            "agent.max_turns": self.agent.max_turns,
            "agent.max_tokens": self.agent.max_tokens,
            "rollout.routing_replay": rollout.routing_replay,
            "reward.function": list(reward.function),
            "reward.weights": list(reward.weights),
            "algorithm.advantage": algorithm.advantage,
            "algorithm.credit": algorithm.credit,
            "algorithm.minibatches": algorithm.minibatches,
            "algorithm.minibatch_by": algorithm.minibatch_by,
            "algorithm.epochs": algorithm.epochs,
            "algorithm.old_logprobs": algorithm.old_logprobs,
            "algorithm.rejected": algorithm.rejected,
            "algorithm.dynamic_sampling": algorithm.dynamic_sampling,
            "algorithm.kl_in": algorithm.kl_in,
            "use of algorithm.kl_coef (above 0)": algorithm.uses_reference,
        }
