"""The training clients of a server, on every rank: each an adapter of one frozen model, with an optimizer of its own.

Every method is collective over the world. Shape suffix: T tokens of one sample.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.rl.backends.local.megatron_backend import MegatronBackend
from isoloss.engine.rl.backends.protocol import all_done
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.versions import WeightVersions
from isoloss.models.lora.config import LoraConfig
from isoloss.parallel import UserError
from isoloss.tools.serve import commands
from isoloss.tools.serve.commands import BASE
from isoloss.tools.serve.losses import kind_of, loss_of
from isoloss.tools.serve.wire import NO_LOGPROB, Datum


class Tenants:
    """Carries out the commands of training clients.

    engine: the frozen model; its own adapter is never trained.
    """

    def __init__(self, engine: Engine, concurrency: int):
        self._base, self._concurrency = engine, concurrency
        self._models: dict[str, Engine] = {}
        # The keys of a version's adapter, and its number among the copies.
        self._versions: dict[str, tuple[LoraConfig, int]] = {}
        self._copies = WeightVersions()
        self._samplers: dict[LoraConfig, Sampler] = {}

    def run(self, command: commands.Command) -> object:
        """Carry out a command; return its result. Raises UserError."""
        match command:
            case commands.CreateModel():
                self.create(command.model_id, command.rank, command.seed, command.targets)
            case commands.ForwardBackward():
                return self.forward_backward(command)
            case commands.OptimStep():
                return self.optim_step(command)
            case commands.SaveWeights():
                self.save(command.model_id, command.folder, command.versions)
            case commands.LoadWeights():
                self.load(command.model_id, command.folder, command.optimizer)
            case commands.Snapshot():
                self.snapshot(command.model_id, command.version)
            case commands.LoadVersion():
                self.load_version(command.version, command.folder, command.rank, command.targets)
            case commands.DropModel():
                self._models.pop(command.model_id, None)
            case commands.Sample():
                return self.sample(command.version, command.requests)
        return None

    def create(self, model_id: str, rank: int, seed: int | None, targets: tuple[str, ...]) -> None:
        self._models[model_id] = self._base.adapter(LoraConfig(rank=rank, seed=seed, targets=targets))

    def forward_backward(self, command: commands.ForwardBackward) -> commands.Losses:
        loss, fields = loss_of(command.loss_fn, command.config), kind_of(command.loss_fn).fields
        samples = [to_sample(datum, fields, f"datum {k}") for k, datum in enumerate(command.data)]
        engine = self._models[command.model_id]
        metrics = (engine.evaluate if command.forward_only else engine.forward_backward)(samples, loss)
        logprobs = [values_T[1:].float().cpu().numpy() for values_T in metrics.outputs["logprobs"]]
        return commands.Losses(metrics.loss, logprobs, metrics.micro_batches)

    def optim_step(self, command: commands.OptimStep) -> Mapping[str, float]:
        result = self._models[command.model_id].optim_step(
            command.learning_rate,
            betas=(command.beta1, command.beta2),
            eps=command.eps,
            weight_decay=command.weight_decay,
            clip=command.grad_clip_norm,
        )
        return {"grad_norm": result.grad_norm, "lr": result.lr, "applied": float(result.applied)}

    def save(self, model_id: str, folder: str, versions: Mapping[str, str]) -> None:
        self._models[model_id].save(folder)
        for version, of_version in versions.items():
            sampler = self._sampler(version)
            sampler.engine.save(of_version)

    def load(self, model_id: str, folder: str, optimizer: bool) -> None:
        engine = self._models[model_id]
        engine.zero_grad()
        engine.load(folder)
        if not optimizer:
            reset_optimizer(engine)

    def snapshot(self, model_id: str, version: str) -> None:
        engine = self._models[model_id]
        lora = engine.config.lora
        self._versions[version] = LoraConfig(rank=lora.rank, targets=lora.targets), self._copies.take(engine)

    def load_version(self, version: str, folder: str, rank: int, targets: tuple[str, ...]) -> None:
        lora = LoraConfig(rank=rank, targets=targets)
        sampler = self._sampler_of(lora)
        sampler.engine.load(folder)
        sampler.version = version
        self._versions[version] = lora, self._copies.take(sampler.engine)

    def sample(self, version: str, requests: Sequence[commands.SampleRequest]) -> list[commands.Sampled]:
        """Return the completions of requests, in their order, on rank 0; outlines on others."""
        sampler = self._sampler(version)
        asked = [
            (Request(id, request.prompt), sampling)
            for request in requests
            if (sampling := _sampling(request)).max_new_tokens
            for id in request.ids
        ]
        backend, completions = sampler.backend, iter(())
        if asked:
            futures = []

            def submit() -> None:
                futures.extend(backend.submit(request, sampling) for request, sampling in asked)

            backend.rank0.compute(submit)
            backend.serve(all_done(futures))
            completions = iter([future.result() for future in futures])
        scored = [request for request in requests if request.prompt_logprobs or request.top]
        prompts = iter(sampler.prompts(scored) if scored else ())
        sampled = []
        for request in requests:
            done = [next(completions, None) for _ in request.ids] if request.max_tokens else []
            logprobs, top = next(prompts) if request.prompt_logprobs or request.top else (None, None)
            sampled.append(commands.Sampled([_numbers(each) for each in done if each], logprobs, top))
        return sampled

    def _sampler(self, version: str) -> "Sampler":
        """Return the sampler, with the factors of a version in it."""
        if version == BASE:
            sampler = self._sampler_of(self._base.config.lora)
        else:
            lora, number = self._versions[version]
            sampler = self._sampler_of(lora)
            if sampler.version != version:
                self._copies.restore(sampler.engine, number)
        sampler.version = version
        sampler.backend.update_weights((), 0)
        return sampler

    def _sampler_of(self, lora: LoraConfig) -> "Sampler":
        if lora not in self._samplers:
            engine = self._base if lora == self._base.config.lora else self._base.adapter(lora)
            self._samplers[lora] = Sampler(engine, self._concurrency)
        return self._samplers[lora]


class Sampler:
    """An adapter that is never trained, whose factors are those of one version at a time."""

    def __init__(self, engine: Engine, concurrency: int):
        self.engine, self.version = engine, BASE
        self.backend = MegatronBackend(engine, concurrency)

    def prompts(
        self, requests: Sequence[commands.SampleRequest]
    ) -> list[tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]]:
        """Return log-probabilities of the tokens of prompts, [T], and of the likeliest ones, [T, top]."""
        most = max((request.top for request in requests), default=0)
        found = []
        for request, read in zip(requests, self.engine.prompt_logprobs([each.prompt for each in requests], most)):
            ids_TK = read.top_ids_TK[:, : request.top].clamp(min=0)
            top = ids_TK, read.top_logprobs_TK[:, : request.top].nan_to_num(NO_LOGPROB)
            arrays = [values.cpu().numpy() for values in (read.logprobs_T, *top)]
            found.append((arrays[0], (arrays[1], arrays[2]) if request.top else None))
        return found


def to_sample(datum: Datum, fields: Sequence[str], id: str) -> Sample:
    """Return the sample of a datum, whose targets need not be its own next tokens.

    A sample predicts position t from the tokens before t, so a last token is added, which no target's prediction reads.
    """
    targets_T = torch.as_tensor(datum.inputs["target_tokens"], dtype=torch.int64)
    if targets_T.ndim != 1:
        raise UserError(f"{id}: several targets a position (target_tokens [N, K]) are not supported yet")
    tokens_T = torch.as_tensor(datum.tokens, dtype=torch.int64)
    values = {}
    for name in fields:
        given = datum.inputs.get(name)
        if given is None:
            if name != "weights":
                raise UserError(f"{id} has no {name!r}, which the loss reads; it has {', '.join(datum.inputs)}")
            given = np.ones(len(targets_T), np.float32)
        values[name] = torch.cat([torch.zeros(1, dtype=torch.float64), torch.as_tensor(given).double()])
    length = len(tokens_T) + 1
    return Sample(
        torch.cat([tokens_T, tokens_T[-1:]]),
        torch.arange(length) > 0,
        fields=values,
        id=id,
        targets_T=torch.cat([tokens_T[:1], targets_T]),
    )


def reset_optimizer(engine: Engine) -> None:
    """Let the moments of AdamW, and its count of steps, begin anew."""
    for part in engine.optimizer.chained_optimizers:
        for group in part.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in part.optimizer.state.values():
            for name, value in state.items():
                state[name] = value.zero_() if isinstance(value, Tensor) else 0


def _sampling(request: commands.SampleRequest) -> Sampling:
    return Sampling(request.max_tokens, request.temperature, request.top_p, request.stop_token_ids, request.seed)


def _numbers(completion: Completion) -> tuple[np.ndarray, np.ndarray, str]:
    tokens, logprobs = np.asarray(completion.tokens, np.int32), np.asarray(completion.logprobs, np.float32)
    return tokens, logprobs, completion.finish
