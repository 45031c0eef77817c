"""Adapters on tiny models: steps of an engine, and the same adapters merged into the weights of a folder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import (
    BatchConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from isoloss.engine.rl import generation
from isoloss.engine.rl.trajectory import Sampling
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.model_source import resolve
from isoloss.engine.step.optimizer import global_grad_norm
from isoloss.engine.step.replica_check import DivergedError
from isoloss.engine.step.together import forward_backward_together
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import adapter_map
from isoloss.models.lora.initial import InitialFactors
from isoloss.parallel import UserError
from support.models.families import VOCAB
from support.models.transformers_parity import TOKEN_MEAN

LORA = LoraConfig(rank=3, alpha=5.0, seed=1)


def make_engine(
    folder: Path,
    lora: LoraConfig = LORA,
    *,
    precision: str = "fp64",
    random_b: bool = True,
    max_tokens: int = 128,
    memory: Mapping[str, Any] = {},
    make: Any = Engine,
    **parallel: Any,
) -> Any:
    """An engine with an adapter, whose B is random, since with B = 0 the gradient of A is 0."""
    config = Config(
        model=ModelConfig(path=str(folder)),
        batch=BatchConfig(max_tokens=max_tokens),
        parallel=ParallelConfig(**parallel),
        memory=MemoryConfig(**memory),
        optim=OptimConfig(lr=1e-2, schedule="constant", weight_decay=0.1, eps=1e-4, clip=0.05),
        train=TrainConfig(precision=precision),
        lora=lora,
    )
    engine = make(config, resolve(config))
    if lora.rank > 0 and random_b:
        engine.trained.adapter.load(InitialFactors(lora.seed, random_b=True))
    return engine


@dataclass(frozen=True)
class Step:
    """gradients: of this rank's factors by Hugging Face name (those of a tensor of all experts by name and row)."""

    loss: float
    base: float
    grad_norm: float
    gradients: dict[str, Tensor]
    losses: list[float]
    factors: dict[str, Tensor]


def step(folder: Path, samples: Sequence[Sample], lora: LoraConfig = LORA, steps: int = 0, **options: Any) -> Step:
    """A step of an adapter with random B; then optimizer steps."""
    engine = make_engine(folder, lora, **options)
    with engine.trained.adapter.off():
        base = engine.evaluate(samples, TOKEN_MEAN).loss
    loss = engine.forward_backward(samples, TOKEN_MEAN).loss
    gradients = {}
    if not engine.config.distributed_optimizer:
        gradients = by_name(engine.trained.adapter.owned(), dict(engine.gradients()))
    engine.reduce_gradients()
    engine.optimizer.prepare_grads()
    norm = global_grad_norm(engine.optimizer)
    engine.zero_grad()
    losses = [engine.train_step(samples, TOKEN_MEAN) for _ in range(steps)]
    whole = {owned.weight.name: tensor for owned, tensor in engine.trained.adapter.whole_tensors()}
    factors = by_name(engine.trained.adapter.owned(), whole)
    numbers = [number for metrics, result in losses for number in (metrics.loss, result.grad_norm)]
    return Step(loss, base, norm, gradients, numbers, factors)


def by_name(owned: Sequence[Any], whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for each in owned:
        for part, tensor in zip(each.weight.parts, each.weight.mapping.split(whole[each.weight.name])):
            found[part.tensor if part.row is None else f"{part.tensor}/{part.row}"] = tensor.clone()
    return found


def all_factors(arch, lora: LoraConfig = LORA) -> dict[str, Tensor]:
    """Every random factor of a model, fp64, by the names of `by_name`."""
    source, found = InitialFactors(lora.seed, random_b=True), {}
    for factors in adapter_map(arch, lora):
        for weight in (factors.a, factors.b):
            for part, tensor in zip(weight.parts, weight.mapping.split(source.whole(weight))):
                found[part.tensor if part.row is None else f"{part.tensor}/{part.row}"] = tensor.double()
    return found


def _of_tensor(name: str, factors: Mapping[str, Tensor]) -> list[tuple[str, int | None]]:
    """The modules (and rows) of the adapters of a Hugging Face tensor."""
    module = name.removesuffix(".weight")
    if f"{module}.lora_A.weight" in factors:
        return [(module, None)]
    rows = [key.rsplit("/", 1)[1] for key in factors if key.startswith(f"{module}.lora_A.weight/")]
    return [(module, int(row)) for row in rows]


def _pair(module: str, row: int | None, factors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    end = "" if row is None else f"/{row}"
    return factors[f"{module}.lora_A.weight{end}"], factors[f"{module}.lora_B.weight{end}"]


def merge_into(folder: Path, factors: Mapping[str, Tensor], scale: float, turned: bool) -> None:
    """Add the adapters to the weights of a folder, which become fp64. turned: experts are stored as [in, out]."""
    (path,) = folder.glob("*.safetensors")
    tensors = {name: tensor.double() for name, tensor in load_file(path).items()}
    for name, tensor in tensors.items():
        for module, row in _of_tensor(name, factors):
            a, b = _pair(module, row, factors)
            delta = scale * b @ a
            (tensor if row is None else tensor[row]).add_(delta.T if turned and row is not None else delta)
    save_file(tensors, path, metadata={"format": "pt"})


def gradients_of_factors(
    of_weights: Mapping[str, Tensor], factors: Mapping[str, Tensor], scale: float, turned: bool
) -> dict[str, Tensor]:
    """By the chain rule from the gradient G of a merged weight W + s B A: s B^T G and s G A^T."""
    found = {}
    for name, of_all in of_weights.items():
        for module, row in _of_tensor(name, factors):
            a, b = _pair(module, row, factors)
            gradient = of_all.double() if row is None else of_all[row].double()
            gradient = gradient.T if turned and row is not None else gradient
            end = "" if row is None else f"/{row}"
            found[f"{module}.lora_A.weight{end}"] = scale * b.T @ gradient
            found[f"{module}.lora_B.weight{end}"] = scale * gradient @ a.T
    return found


def step_of(folder: Path, samples: Sequence[Sample], options: Mapping[str, Any]) -> Step:
    return step(folder, samples, **options)


def recomputed(folder: Path, samples: Sequence[Sample], layout: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients of this rank with and without full recomputation."""
    kept = step(folder, samples, **layout).gradients
    again = step(folder, samples, memory={"recompute": "full"}, **layout).gradients
    return {name: (tensor, again[name]) for name, tensor in kept.items()}


def with_a_flipped_factor(folder: Path, layout: Mapping[str, Any]) -> str:
    """The error of a check after one rank's copy of a factor has changed by one bit."""
    engine = make_engine(folder, **layout)
    world = dist.new_group(backend="gloo")
    engine.check_replicas(world, "before anything")
    copies = (each for each in engine.trained.adapter.owned() if each.weight.name.endswith("linear_qkv.lora_A"))
    bits = next(copies).parameter.data.view(torch.int64)
    bits[0, 0] ^= dist.get_rank()
    try:
        engine.check_replicas(world, "after step 1")
    except DivergedError as error:
        return str(error)
    return "nothing"


def by_hand(arch, rank: int = LORA.rank) -> int:
    """Numbers of the factors of a dense model: r (in + out) of each of its seven projections."""
    attention, mlp = arch.layers[0].attention, arch.layers[0].mlp
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    shapes = [
        (arch.hidden_size, queries),
        (arch.hidden_size, keys),
        (arch.hidden_size, keys),
        (queries, arch.hidden_size),
    ]
    shapes += [(arch.hidden_size, mlp.width)] * 2 + [(mlp.width, arch.hidden_size)]
    return arch.num_layers * sum(rank * (inputs + outputs) for inputs, outputs in shapes)


def saved(folder: Path, out: Path, samples: Sequence[Sample], options: Mapping[str, Any]) -> list[float]:
    """Two steps, a checkpoint, and the losses and norms of two steps more."""
    engine = make_engine(folder, **options)
    for _ in range(2):
        engine.train_step(samples, TOKEN_MEAN)
    engine.save(out, {"step": 2})
    return _two_steps(engine, samples)


def resumed(folder: Path, out: Path, samples: Sequence[Sample], options: Mapping[str, Any]) -> list[float]:
    """The losses and norms of the two steps after the checkpoint."""
    engine = make_engine(folder, **options)
    assert engine.load(out) == {"step": 2}
    return _two_steps(engine, samples)


def refused_start(folder: Path, adapter: Path, options: Mapping[str, Any]) -> str:
    """What this rank says of an adapter to start from."""
    try:
        make_engine(folder, replace(LORA, init=str(adapter), seed=None), random_b=False, **options)
    except UserError as error:
        return str(error)
    return "nothing"


def exported(folder: Path, out: Path, samples: Sequence[Sample], layout: Mapping[str, Any]) -> float:
    """The loss of an adapter that is exported."""
    engine = make_engine(folder, **layout)
    engine.export_adapter(out)
    return engine.evaluate(samples, TOKEN_MEAN).loss


def _two_steps(engine: Engine, samples: Sequence[Sample]) -> list[float]:
    done = [engine.train_step(samples, TOKEN_MEAN) for _ in range(2)]
    return [number for metrics, result in done for number in (metrics.loss, result.grad_norm)]


def change_one_number(folder: Path) -> None:
    """Change the last bit or so of one weight of a folder."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1e-6
    save_file(tensors, path, metadata={"format": "pt"})


TENANTS = (
    LoraConfig(rank=3, alpha=5.0, seed=1),
    LoraConfig(rank=2, alpha=8.0, seed=2, targets=("attention",)),
    LoraConfig(rank=5, alpha=1.0, seed=3, scaling="sqrt-rank", targets=("mlp",)),
    LoraConfig(rank=3, alpha=5.0, seed=4),
    LoraConfig(rank=8, alpha=32.0, seed=5, targets=("o_proj", "down_proj")),
)


@dataclass(frozen=True)
class Tenant:
    """What one adapter of a model found. numbers: losses and norms of its steps. factors: this rank's, in the end."""

    numbers: list[float]
    factors: dict[str, Tensor]


def _tenant(numbers: list[float], engine: Engine) -> Tenant:
    whole = {owned.weight.name: tensor for owned, tensor in engine.trained.adapter.whole_tensors()}
    return Tenant(numbers, by_name(engine.trained.adapter.owned(), whole))


def _samples_of(samples: Sequence[Sample], index: int) -> list[Sample]:
    """Samples of a tenant: each has others, and another number."""
    return [*samples[index % 3 :], *samples[: index % 2]]


def alone(folder: Path, samples: Sequence[Sample], index: int, options: Mapping[str, Any]) -> Tenant:
    """Three steps of one adapter."""
    engine, numbers = make_engine(folder, TENANTS[index], **options), []
    for _ in range(3):
        numbers += _numbers(engine, engine.forward_backward(_samples_of(samples, index), TOKEN_MEAN))
    return _tenant([*numbers, _said(engine, samples)], engine)


def _said(engine: Engine, samples: Sequence[Sample]) -> float:
    return sum(float(each.sum()) for each in engine.logprobs(samples))


def _numbers(engine: Engine, metrics: Any) -> list[float]:
    return [metrics.loss, engine.optim_step().grad_norm]


def among_others(folder: Path, samples: Sequence[Sample], out: Path, options: Mapping[str, Any]) -> list[Tenant]:
    """Three steps of five adapters of one model, one after the other and all at once, while the last one loads a
    checkpoint of its own, and takes a step that is not applied."""
    first = make_engine(folder, TENANTS[0], **options)
    engines = [first, *(first.adapter(lora) for lora in TENANTS[1:])]
    for engine, lora in zip(engines, TENANTS):
        engine.trained.adapter.load(InitialFactors(lora.seed, random_b=True))
    numbers: list[list[float]] = [[] for _ in engines]
    batches = [_samples_of(samples, index) for index in range(len(engines))]
    last = engines[-1]
    last.save(out, {})
    for turn in range(3):
        if turn == 1:  # micro-batches of all in one schedule
            calls = [(engine, batch, TOKEN_MEAN) for engine, batch in zip(engines, batches)]
            found = forward_backward_together(calls)
        else:  # forward and backward of all before the first step
            found = [engine.forward_backward(batch, TOKEN_MEAN) for engine, batch in zip(engines, batches)]
        for engine, metrics, told in zip(engines, found, numbers):
            told += _numbers(engine, metrics)
        infinite = last.forward_backward(samples, lambda inputs: -inputs.logprobs_N * math.inf)
        assert not last.optim_step().applied and not math.isfinite(infinite.loss)
        last.load(out)
        if turn < 2:
            last.offload_adapter()
    return [_tenant([*told, _said(engine, samples)], engine) for told, engine in zip(numbers, engines)]


def with_a_tenant_that_recomputes(
    folder: Path, samples: Sequence[Sample], options: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of two adapters in one schedule, alone and with full recomputation of both."""
    found = []
    for recompute in ("none", "full"):
        first = make_engine(folder, TENANTS[0], memory={"recompute": recompute}, max_tokens=48, **options)
        second = first.adapter(TENANTS[3])
        second.trained.adapter.load(InitialFactors(TENANTS[3].seed, random_b=True))
        engines = (first, second)
        if recompute == "none":
            for engine in engines:
                engine.forward_backward(samples, TOKEN_MEAN)
        else:
            forward_backward_together([(engine, samples, TOKEN_MEAN) for engine in engines])
        found.append(
            {
                f"{index}/{name}": tensor
                for index, engine in enumerate(engines)
                for name, tensor in by_name(engine.trained.adapter.owned(), dict(engine.gradients())).items()
            }
        )
    return found[0], found[1]


def refused(folder: Path) -> dict[str, str]:
    """What is said to mistakes with several adapters."""
    first, whole = make_engine(folder, LORA), make_engine(folder, LoraConfig())
    second = first.adapter(TENANTS[1])
    said = {}
    for name, mistake in {
        "of a whole model": lambda: whole.adapter(LORA),
        "without a rank": lambda: first.adapter(LoraConfig()),
        "unknown target": lambda: first.adapter(LoraConfig(rank=2, targets=("w9",))),
        "of two models": lambda: forward_backward_together([(first, [], TOKEN_MEAN), (whole, [], TOKEN_MEAN)]),
        "twice": lambda: forward_backward_together([(second, [], TOKEN_MEAN), (second, [], TOKEN_MEAN)]),
    }.items():
        try:
            mistake()
        except (UserError, ValueError) as error:
            said[name] = str(error)
    return said


def generated(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tokens of two adapters of one model."""
    first = make_engine(folder, TENANTS[0], make=generation.Engine)
    second = first.adapter(TENANTS[3])
    second.trained.adapter.load(InitialFactors(TENANTS[3].seed, random_b=True))
    sampling = Sampling(12, 1.0, stop_token_ids=(VOCAB,), seed=3)

    def tokens(engine: generation.Engine) -> tuple[int, ...]:
        return engine.generate([[1, 2, 3]], sampling)[0].tokens

    found = {"first": tokens(first), "second": tokens(second)}
    second.logprobs([Sample(torch.arange(5), torch.arange(5) > 0)])
    return found | {"first, after a step of the second": tokens(first)}


def started(
    folder: Path, lora: LoraConfig, samples: Sequence[Sample], layout: Mapping[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    """The loss of an engine that starts from the adapter of lora.init, and this rank's factors."""
    engine = make_engine(folder, lora, random_b=False, **layout)
    whole = {owned.weight.name: tensor for owned, tensor in engine.trained.adapter.whole_tensors()}
    return engine.evaluate(samples, TOKEN_MEAN).loss, by_name(engine.trained.adapter.owned(), whole)


def saved_and_exported(folder: Path, checkpoint: Path, out: Path, lora: LoraConfig, layout: Mapping[str, Any]) -> None:
    """A checkpoint and an export of the same adapter."""
    engine = make_engine(folder, lora, **layout)
    engine.save(checkpoint)
    engine.export_adapter(out)
