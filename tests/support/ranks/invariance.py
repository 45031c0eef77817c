"""The models of the invariance tests, and what their ranks run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.models.mcore import build
from isoloss.models.mcore.gpt import unwrap
from isoloss.tools.prove.parity import Case, Measurement, measure, thaw

MAX_LENGTH = 96
# 8 heads, 4 key/value heads and 8 layers divide by every degree up to 8 that a grid asks of them.
WIDE = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
QWEN3 = WIDE | {"hidden_size": 40, "intermediate_size": 72, "head_dim": 6, "rms_norm_eps": 1e-6}  # of families' qwen3
FOUR_LAYERS = QWEN3 | {"num_hidden_layers": 4}


# What QWEN3 admits on 2 to 8 ranks, worked out by hand. Degrees are powers of two whose exponents over tp, pp,
# ulysses, ring and dp add up to 1 (5 ways), 2 (15) or 3 (35, less four eighths that are not asked for): 51. Each of the
# 20 with tp stands once more without sequence parallelism, each of the 20 with pp once more interleaved, the 6 with
# both a fourth time. No rule forbids one.
BY_HAND = """
dp2 ring2 ulysses2 pp2 pp2+vpp2 tp2 tp2+nosp dp4 ring2+dp2 ring4 ulysses2+dp2 ulysses2+ring2 ulysses4 pp2+dp2
pp2+vpp2+dp2 pp2+ring2 pp2+vpp2+ring2 pp2+ulysses2 pp2+vpp2+ulysses2 pp4 pp4+vpp2 tp2+dp2 tp2+dp2+nosp tp2+ring2
tp2+ring2+nosp tp2+ulysses2 tp2+ulysses2+nosp tp2+pp2 tp2+pp2+nosp tp2+pp2+vpp2 tp2+pp2+vpp2+nosp tp4 tp4+nosp
ring2+dp4 ring4+dp2 ulysses2+dp4 ulysses2+ring2+dp2 ulysses2+ring4 ulysses4+dp2 ulysses4+ring2 ulysses8 pp2+dp4
pp2+vpp2+dp4 pp2+ring2+dp2 pp2+vpp2+ring2+dp2 pp2+ring4 pp2+vpp2+ring4 pp2+ulysses2+dp2 pp2+vpp2+ulysses2+dp2
pp2+ulysses2+ring2 pp2+vpp2+ulysses2+ring2 pp2+ulysses4 pp2+vpp2+ulysses4 pp4+dp2 pp4+vpp2+dp2 pp4+ring2
pp4+vpp2+ring2 pp4+ulysses2 pp4+vpp2+ulysses2 tp2+dp4 tp2+dp4+nosp tp2+ring2+dp2 tp2+ring2+dp2+nosp tp2+ring4
tp2+ring4+nosp tp2+ulysses2+dp2 tp2+ulysses2+dp2+nosp tp2+ulysses2+ring2 tp2+ulysses2+ring2+nosp tp2+ulysses4
tp2+ulysses4+nosp tp2+pp2+dp2 tp2+pp2+dp2+nosp tp2+pp2+vpp2+dp2 tp2+pp2+vpp2+dp2+nosp tp2+pp2+ring2
tp2+pp2+ring2+nosp tp2+pp2+vpp2+ring2 tp2+pp2+vpp2+ring2+nosp tp2+pp2+ulysses2 tp2+pp2+ulysses2+nosp
tp2+pp2+vpp2+ulysses2 tp2+pp2+vpp2+ulysses2+nosp tp2+pp4 tp2+pp4+nosp tp2+pp4+vpp2 tp2+pp4+vpp2+nosp tp4+dp2
tp4+dp2+nosp tp4+ring2 tp4+ring2+nosp tp4+ulysses2 tp4+ulysses2+nosp tp4+pp2 tp4+pp2+nosp tp4+pp2+vpp2
tp4+pp2+vpp2+nosp
"""


def random_targets(lengths: Sequence[int], vocab: int, seed: int) -> list[Sample]:
    """Two samples a prompt; the fifth of five or more has no target."""
    rng = np.random.default_rng(seed)
    samples = []
    for index, length in enumerate(lengths):
        mask = torch.from_numpy(rng.random(length) < 0.7)
        mask[0] = False
        samples.append(Sample(torch.from_numpy(rng.integers(0, vocab, length)), mask & (index != 4), index // 2))
    return samples


def loss_of(mode: str, norm_length: int = MAX_LENGTH) -> LossConfig:
    return LossConfig(mode, norm_length if mode == "seq-mean-token-sum-norm" else None)


def cases(pairs: Iterable[tuple[str, int]], norm_length: int = MAX_LENGTH) -> list[Case]:
    """Of cross-entropy: (mode, token budget) each."""
    return [Case(budget, loss_of(mode, norm_length)) for mode, budget in pairs]


@dataclass(frozen=True)
class Steps:
    """Of each step."""

    losses: list[float]
    norms: list[float]


def steps(config: Config, frozen: bytes, count: int) -> Steps:
    """Of `count` optimizer steps on the same samples."""
    engine = Engine(config)
    samples, loss = thaw(frozen), cross_entropy(LossConfig())
    done = [engine.train_step(samples, loss) for _ in range(count)]
    return Steps([metrics.loss for metrics, _ in done], [result.grad_norm for _, result in done])


def losses(config: Config, frozen: bytes, steps: int) -> list[float]:
    """The loss of each of `steps` optimizer steps on the same samples."""
    engine = Engine(config)
    samples = thaw(frozen)
    loss = cross_entropy(LossConfig())
    return [engine.train_step(samples, loss)[0].loss for _ in range(steps)]


def count_reductions(config: Config, frozen: bytes) -> tuple[int, int]:
    """How many all-reduces of int64 tensors one step enters, and its number of micro-batches."""
    engine = Engine(config)
    samples = thaw(frozen)
    calls = []
    original = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        if tensor.dtype == torch.int64:
            assert kwargs["group"] is engine.mesh.dp_context
            calls.append(tensor.shape)
        return original(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        metrics = engine.forward_backward(samples, cross_entropy(LossConfig()))
    return len(calls), metrics.micro_batches


def dtypes(config: Config) -> tuple[set[str], set[str]]:
    """Of the weights, and of the buffers that their gradients are accumulated and reduced in."""
    parameters = [parameter for chunk in Engine(config).chunks for parameter in chunk.parameters()]
    return {str(p.dtype) for p in parameters}, {str(p.main_grad.dtype) for p in parameters}


def with_batched_messages(config: Config, *rest) -> list[Measurement]:
    """`measure` where stages send as Megatron does by default."""
    original = build.transformer_config

    def transformer_config(*args, **options):
        config = original(*args, **options)
        config.overlap_p2p_comm, config.batch_p2p_comm = False, True
        return config

    with mock.patch.object(build, "transformer_config", transformer_config):
        return measure(config, *rest)


def of_temperatures(config: Config, frozen: bytes, temperatures: list[float]) -> list[tuple[float, float]]:
    """For each temperature the mean and the largest distance between the engine's log-probabilities and those of its
    logits divided by it, in fp64."""
    engine, samples, found = Engine(config), thaw(frozen), []
    with torch.no_grad():
        output = unwrap(engine.chunks[-1]).output_weight()
        output *= 3 / engine.logits(samples[:1])[0][samples[0].mask_T].std()  # as large as those of a trained model
    targets = [sample.tokens_T[sample.mask_T] for sample in samples]
    logits = [of_sample[sample.mask_T] for of_sample, sample in zip(engine.logits(samples), samples)]
    for temperature in temperatures:
        errors = [
            torch.log_softmax(z.double() / temperature, -1).gather(1, t[:, None]).squeeze(1) - p[s.mask_T]
            for z, t, p, s in zip(logits, targets, engine.logprobs(samples, temperature), samples)
        ]
        errors = torch.cat(errors).abs()
        found.append((float(errors.mean()), float(errors.max())))
    return found


def evaluated(config: Config, frozen: bytes, loss: LossConfig) -> float:
    return Engine(config).evaluate(thaw(frozen), cross_entropy(loss)).loss


def logprobs(config: Config, frozen: bytes) -> list[list[float]]:
    """log-probabilities of every sample's targets."""
    return [values.tolist() for values in Engine(config).logprobs(thaw(frozen))]
