"""The knobs of reinforcement learning, besides those of `isoloss.engine.config`."""

from dataclasses import dataclass, field
from typing import Literal

from isoloss.engine.config import Config, LossConfig, require
from isoloss.parallel import UserError
from isoloss.parallel.normalizer import MODES


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are generated.

    backend: `transformers` runs in the training processes, `sglang` on the servers of rollout.servers.
    num_generations: completions of each prompt. max_new_tokens: of a completion. eval_temperature: of evaluations;
    null means temperature. concurrency: completions under way at a time, of each rank (transformers) or in all (sglang).
    bucket_mb: weights travel to the backend in buckets of this size.

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
        require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "must be above 0 and at most 1")
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
        for url in (*self.servers, *([self.router] if self.router else ())):
            require(
                url.startswith(("http://", "https://")), "rollout.servers", url, "must be URLs that begin with http://"
            )


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
