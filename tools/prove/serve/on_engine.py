"""Play the session on an `Engine`, without a server: the losses by formulas of its own, and completions read again."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, Term, TokenInputs, target_logprobs
from isoloss.engine.step.versions import WeightVersions
from isoloss.models.lora.config import LoraConfig
from isoloss.parallel.aggregation import Aggregation
from isoloss.recipes import launch
from isoloss.tools.prove.serve.player import Record
from isoloss.tools.prove.serve.session import (
    Call,
    Client,
    Completions,
    Continue,
    Datum,
    Load,
    Request,
    Save,
    Snapshot,
    Step,
)
from isoloss.tools.serve.config import ServeConfig

TARGETS = {"train_attn": "attention", "train_mlp": "mlp", "train_unembed": "lm_head"}


def play_on_engine(words: Sequence[str], clients: Sequence[Client], answered: Record) -> Record:
    """Return the numbers of a session on one rank.

    answered: numbers of a server; tokens of completions are taken from them, and their log-probabilities computed.
    """
    config, *_ = launch.compose_config("serve", ServeConfig, words)
    base, record = Engine(config.of_engine()), Record()
    for client in clients:
        shape = client.shape
        targets = [name for flag, name in TARGETS.items() if shape[flag]]
        lora = LoraConfig(rank=shape["rank"], seed=shape["seed"], targets=tuple(targets))
        with tempfile.TemporaryDirectory(prefix="isoloss-proof-") as folder:
            Loop(base, base.adapter(lora), Path(folder), answered, record).play(client.requests)
    return record


class Loop:
    """A loop over an engine, which is an adapter of `base`: a training client, and those that continue from it."""

    def __init__(self, base: Engine, engine: Engine, folder: Path, answered: Record, record: Record):
        self._base, self._engine, self._folder, self._answered = base, engine, folder, answered
        self._record, self._lora = record, engine.config.lora
        self._versions, self._taken = WeightVersions(), dict[str, int]()

    def play(self, requests: Sequence[tuple[str, Request]]) -> None:
        for label, request in requests:
            match request:
                case Call(data, loss_fn, options, forward_only):
                    samples = [to_sample(datum) for datum in data]
                    compute = self._engine.evaluate if forward_only else self._engine.forward_backward
                    metrics = compute(samples, loss_of(loss_fn, options))
                    logprobs = np.concatenate([row[1:].float().numpy() for row in metrics.outputs["logprobs"]])
                    self._record[label] = {"loss": np.array(metrics.loss), "logprobs": logprobs}
                case Step(adam):
                    result = self._engine.optim_step(
                        adam["learning_rate"],
                        betas=(adam["beta1"], adam["beta2"]),
                        eps=adam["eps"],
                        weight_decay=adam.get("weight_decay", 0.0),
                        clip=adam.get("grad_clip_norm", 0.0),
                    )
                    applied = np.array(float(result.applied))
                    self._record[label] = {"grad_norm": np.array(result.grad_norm), "applied": applied}
                case Snapshot(name):
                    self._taken[name] = self._versions.take(self._engine)
                case Completions(snapshot):
                    self._read_again(label, request, self._taken[snapshot])
                case Save(name):
                    self._engine.save(self._folder / name)
                case Load(name, optimizer):
                    self._engine = self._loaded(name, optimizer)
                case Continue(name, optimizer, others):
                    loaded = self._loaded(name, optimizer)
                    other = Loop(self._base, loaded, self._folder, self._answered, self._record)
                    other.play([(f"{label} {k}", each) for k, each in enumerate(others)])

    def _loaded(self, name: str, optimizer: bool) -> Engine:
        """Return an engine with the weights of a checkpoint, and its optimizer or a new one."""
        loaded = self._base.adapter(self._lora)
        loaded.load(self._folder / name)
        if optimizer:
            return loaded
        fresh, weights = self._base.adapter(self._lora), WeightVersions()
        weights.restore(fresh, weights.take(loaded))
        return fresh

    def _read_again(self, label: str, asked: Completions, version: int) -> None:
        """Note the log-probabilities that the weights of a version give to the tokens of completions."""
        answered = self._answered[label]
        reader, rows = self._base.adapter(self._lora), []
        self._versions.restore(reader, version)
        for part in np.split(answered["tokens"], np.cumsum(answered["lengths"])[:-1]):
            tokens_T = torch.tensor([*asked.prompt, *part.tolist()])
            rows.append(Sample(tokens_T, torch.arange(len(tokens_T)) > 0))
        start = len(asked.prompt)
        found = reader.logprobs(rows, asked.temperature)
        plain = reader.logprobs(rows[:1])[0][1:start].float().numpy()
        logprobs = np.concatenate([row[start:].float().numpy() for row in found])
        self._record[label] = {**answered, "logprobs": logprobs, "prompt": plain}


def to_sample(datum: Datum) -> Sample:
    """Return the sample of a datum: every position is a target, and behind it is a token that no target reads."""
    tokens_T = torch.tensor([*datum.tokens, datum.tokens[-1]])
    targets = torch.from_numpy(datum.inputs["target_tokens"])
    fields = {
        name: torch.cat([torch.zeros(1, dtype=torch.float64), torch.from_numpy(array).double()])
        for name, array in datum.inputs.items()
        if name != "target_tokens"
    }
    return Sample(
        tokens_T, torch.arange(len(tokens_T)) > 0, fields=fields, targets_T=torch.cat([tokens_T[:1], targets])
    )


def loss_of(loss_fn: str, options: Mapping[str, float]) -> Loss:
    """Return a loss of the session, written down as the API's public pages have it."""
    of_token = FORMULAS[loss_fn]

    def per_token(inputs: TokenInputs) -> Tensor:
        return of_token(inputs.logprobs_N, inputs.fields, options)

    return Loss((Term(per_token, Aggregation("sum")),), outputs={"logprobs": target_logprobs})


def _ratio(logp: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logp - fields["logprobs"])


def _clipped(ratio: Tensor, options: Mapping[str, float], low: float, high: float) -> Tensor:
    return ratio.clamp(options.get("clip_low_threshold", low), options.get("clip_high_threshold", high))


def _ppo(logp: Tensor, fields: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    ratio, advantages = _ratio(logp, fields), fields["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, options, 0.8, 1.2) * advantages)


FORMULAS: Mapping[str, Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]] = {
    "cross_entropy": lambda logp, fields, options: -fields["weights"] * logp,
    "importance_sampling": lambda logp, fields, options: -_ratio(logp, fields) * fields["advantages"],
    "ppo": _ppo,
    "cispo": lambda logp, fields, options: (
        -_clipped(_ratio(logp, fields), options, 0.0, 4.0).detach() * logp * fields["advantages"]
    ),
    "dro": lambda logp, fields, options: (
        -(logp * fields["advantages"] - options["beta"] / 2 * (logp - fields["logprobs"]).square())
    ),
}
