"""Load the prompts and open the reward functions and the rollout backend of a reinforcement learning run."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from isoloss.engine.config import rules
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import check_files, steps_for_epochs
from isoloss.engine.data.mixture import content
from isoloss.engine.rl.agents.agents import Agents, Limits
from isoloss.engine.rl.agents.dialogue import Dialogue
from isoloss.engine.rl.agents.pool import AgentPool
from isoloss.engine.rl.backends.local.megatron_backend import MegatronBackend
from isoloss.engine.rl.backends.local.transformers_backend import TransformersBackend
from isoloss.engine.rl.backends.protocol import RolloutBackend
from isoloss.engine.rl.backends.servers.backend import ServerBackend
from isoloss.engine.rl.backends.sglang.adapters import adapter_fleet
from isoloss.engine.rl.backends.sglang.server import SGLangServer
from isoloss.engine.rl.backends.sglang.weights import weight_sync
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.prompts import PromptSet, load_prompts, stop_tokens
from isoloss.engine.rl.reward.in_process import Reward
from isoloss.engine.rl.reward.rewarder import Rewarder
from isoloss.engine.rl.rollout import Offloadable, Rollout
from isoloss.engine.run.folder import Fingerprint, tokenizer_folder
from isoloss.engine.run.session import Data
from isoloss.engine.step.engine import Engine
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import hf_folder
from isoloss.parallel import UserError
from isoloss.parallel.runtime import environment

if TYPE_CHECKING:
    from isoloss.engine.rl.agents.endpoint import Endpoint


@dataclass(frozen=True)
class RLData(Data[PromptSet]):
    """Prompts and their tokenizer. stop_token_ids: tokens that also end a completion."""

    tokenizer: Any

    def fingerprints(self) -> list[Fingerprint]:
        """Return fingerprints of the prompts, the tokens that end completions and the vocabulary of rewards' texts."""
        vocabulary = json.dumps(self.tokenizer.get_vocab(), sort_keys=True).encode()
        prompts = (
            "a file of data.train, its name or weight, data.columns, data.system, data.max_length, data.overlong, "
            "data.duplicates, data.template_kwargs, data.date, the tokenizer or its chat template"
        )
        stops = "eos_token_id of generation_config.json, or eos_token of the tokenizer,"
        return [
            Fingerprint("the content of data.train", content(self.train.fingerprint, self.train.mixture), prompts),
            Fingerprint("the list of tokens that end a completion", str(list(self.stop_token_ids)), stops),
            Fingerprint("the vocabulary", hashlib.sha256(vocabulary).hexdigest()[:16], "the tokenizer"),
        ]


def load_data(config: RLConfig, arch: Architecture) -> RLData:
    """Read and tokenize the prompts. Enters no collective.

    A prompt and rollout.max_new_tokens have to fit data.max_length and the model's positions.
    """
    folder = hf_folder(config.model.path)
    if config.algorithm.uses_critic:
        rules.check(config, arch.as_critic(), config.parallel.layout())
    check_files(config.data)
    room, limit = prompt_room(config, arch)
    tokenizer = load_tokenizer(str(tokenizer_folder(config)), arch.vocab_size)
    options = {"max_prompt_tokens": room, "limit": limit}
    train = load_prompts(config.data, "train", tokenizer, duplicates=config.data.duplicates, **options)
    evaluation = load_prompts(config.data, "eval", tokenizer, **options) if config.data.eval else None
    batches = steps_for_epochs(len(train.prompts), config.train.epochs, config.batch.global_size)
    return RLData(
        train,
        evaluation,
        config.train.steps or batches * config.steps_per_batch,
        stop_tokens(folder, tokenizer, config.data.template_variables),
        tokenizer,
    )


def prompt_room(config: RLConfig, arch: Architecture) -> tuple[int, str]:
    """Return the most tokens of a prompt, and the keys that it follows from. Raises UserError if there is no room."""
    limits = {
        "data.max_length": config.data.max_length,
        "max_position_embeddings": arch.max_positions,
    }
    key = min(limits, key=lambda name: limits[name])
    room = limits[key] - config.rollout.max_new_tokens
    if room < 1:
        raises = f"raise {key}" if key == "data.max_length" else "take a model with more positions"
        raise UserError(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} leaves no room for a prompt within {key}="
            f"{limits[key]}; lower rollout.max_new_tokens, such as to {limits[key] // 2}, or {raises}"
        )
    return room, f"{key} - rollout.max_new_tokens"


@contextlib.contextmanager
def open_rewarder(config: RLConfig, data: RLData, given: Mapping[str, Reward] = {}) -> Iterator[Rewarder | None]:
    """Open the reward functions, in worker processes of rank 0; None on other ranks, which do not call them, and where
    environment.program gives the rewards.

    given: functions of reward.function that are called in this process, by name.
    Raises UserError, on rank 0, where a function cannot be used. Enters no collective.
    """
    if environment.rank_and_world()[0] > 0 or config.environment.program is not None:
        yield None
        return
    prompts = data.train.prompts + (data.eval.prompts if data.eval else ())
    with Rewarder(config.reward, data.tokenizer, prompts, config.rollout.api_key_env, given) as rewarder:
        yield rewarder


@contextlib.contextmanager
def open_agents(config: RLConfig, data: RLData, arch: Architecture) -> Iterator[Agents | None]:
    """Open the sessions of environment.program, in worker processes of rank 0; None without one, and on other ranks.

    Raises UserError, on rank 0, where the program cannot be loaded, or calls of tools would not be found. Enters no
    collective.
    """
    program, agent = config.environment.program, config.agent
    if program is None or environment.rank_and_world()[0] > 0:
        yield None
        return
    dialogue = Dialogue(data.tokenizer, config.data.template_variables, agent.history, agent.tool_parser)
    limits = Limits(
        agent.max_turns,
        config.trajectory_tokens,
        config.rollout.max_new_tokens,
        min(config.data.max_length, arch.max_positions),
        agent.timeout,
        config.environment.retries,
        config.environment.concurrency,
    )
    workers, python = config.environment.workers, config.environment.python
    pool = AgentPool(program, workers, python, config.rollout.api_key_env)
    with contextlib.ExitStack() as stack:
        url = None
        if config.environment.serves:
            endpoint = stack.enter_context(contextlib.closing(open_endpoint(config.rollout.temperature)))
            url = endpoint.url
        agents = stack.enter_context(contextlib.closing(Agents(pool, dialogue, limits, config.train.seed, url)))
        if config.environment.serves:
            endpoint.chat = agents.chat
        yield agents


def open_endpoint(temperature: float) -> "Endpoint":
    """Return the endpoint for clients of OpenAI's API. Raises UserError where its server is not installed."""
    try:
        from isoloss.engine.rl.agents.endpoint import Endpoint
    except ImportError as error:
        raise UserError(
            f"environment.endpoint=true and command: need a server ({error}): pip install 'isoloss[serve]'"
        ) from error
    return Endpoint(temperature)


@contextlib.contextmanager
def open_rollout(
    config: RLConfig,
    engine: Engine,
    data: RLData,
    rewarder: Rewarder | None,
    output_dir: Path,
    offloadables: Sequence[Offloadable] = (),
    agents: Agents | None = None,
) -> Iterator[Rollout]:
    """Open the rollout with the configured backend. offloadables, agents: see `Rollout`. Collective over the world."""
    if config.rollout.colocated:  # servers that are started here find the device empty
        for part in (engine, *offloadables):
            part.offload()
        dist.barrier()
    backend = open_backend(config, engine, output_dir)
    try:
        backend.check_health()
        rollout = Rollout(engine, backend, rewarder, config, data.train, data.stop_token_ids, offloadables, agents)
        with contextlib.closing(rollout):
            yield rollout
    finally:
        backend.close()


def open_backend(config: RLConfig, engine: Engine, output_dir: Path) -> RolloutBackend:
    if config.rollout.backend == "sglang":
        logs = output_dir / "sglang"
        kind = SGLangServer, weight_sync
        if engine.trained.adapter is not None:
            kind = adapter_fleet(engine.arch, config.lora)
        return ServerBackend(config.rollout, config.model.path, engine.arch.vocab_size, logs, *kind)
    if config.rollout.backend == "megatron":
        return MegatronBackend(engine, config.rollout.concurrency)
    model = config.model
    copy_of = engine.model.dtype, engine.device, config.rollout.concurrency
    return TransformersBackend(model.path, *copy_of, model.tokenizer or None)
