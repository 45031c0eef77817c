"""The training clients of a server, on every rank: each an adapter of one frozen model, with an optimizer of its own.

Every method is collective over the world. Shape suffix: T tokens of one sample.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from isoloss.engine.instruments import watchdog
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.versions import WeightVersions
from isoloss.models.lora.config import LoraConfig
from isoloss.parallel import UserError
from isoloss.parallel.rank0 import RankZero
from isoloss.tools.serve import commands
from isoloss.tools.serve.commands import BASE
from isoloss.tools.serve.ranks.losses import kind_of, loss_of
from isoloss.tools.serve.ranks.sampler import Sampler
from isoloss.tools.serve.ranks.samples import to_sample


class Tenants:
    """Carries out the commands of training clients.

    engine: the frozen model; its own adapter is never trained.
    publish: gives every version, whose folder it gets, to servers that sample; called on rank 0.
    folder: parent of such folders; None where the ranks sample.
    forget: lets the servers forget a version; called on rank 0.
    """

    def __init__(
        self,
        engine: Engine,
        concurrency: int,
        folder: Path | None = None,
        publish: Callable[[str, Path], None] = lambda version, folder: None,
        forget: Callable[[str], None] = lambda version: None,
    ):
        self._folder, self._publish, self._forget = folder, publish, forget
        self._rank0 = RankZero(patient=watchdog.patient) if folder is not None else None
        self._base, self._concurrency = engine, concurrency
        self._models: dict[str, Engine] = {}
        # The keys of a version's adapter, and its number among the copies.
        self._versions: dict[str, tuple[LoraConfig, int]] = {}
        self._copies = WeightVersions()
        self._samplers: dict[LoraConfig, Sampler] = {}

    def run(self, command: commands.Command) -> object:
        """Carry out a command but those of `Sampler`; return its result. Raises UserError."""
        match command:
            case commands.CreateModel():
                lora = LoraConfig(rank=command.rank, seed=command.seed, targets=command.targets)
                self._models[command.model_id] = self._base.adapter(lora)
            case commands.ForwardBackward():
                return self.forward_backward(command)
            case commands.OptimStep():
                return self.optim_step(command)
            case commands.SaveWeights():
                self._models[command.model_id].save(command.folder)
            case commands.ExportAdapter():
                self._models[command.model_id].export_adapter(command.folder)
            case commands.LoadWeights():
                self.load(command.model_id, command.folder, command.optimizer)
            case commands.DropModel():
                self._models.pop(command.model_id, None)
            case commands.Snapshot():
                self.snapshot(command.model_id, command.version)
            case commands.SaveVersion():
                self.sampler(command.version).engine.save(command.folder)
            case commands.LoadVersion():
                self.load_version(command.version, command.folder, command.rank, command.targets)
            case commands.DropVersion():
                self.drop_version(command.version)
        return None

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

    def load(self, model_id: str, folder: str, optimizer: bool) -> None:
        engine = self._models[model_id]
        engine.zero_grad()
        engine.load(folder)
        if not optimizer:
            reset_optimizer(engine)

    # ---- versions ---------------------------------------------------------------------------------------------------

    def snapshot(self, model_id: str, version: str) -> None:
        engine = self._models[model_id]
        lora = engine.config.lora
        self._note(version, LoraConfig(rank=lora.rank, targets=lora.targets), self._copies.take(engine))
        self._send(version)

    def load_version(self, version: str, folder: str, rank: int, targets: tuple[str, ...]) -> None:
        lora = LoraConfig(rank=rank, targets=targets)
        engine = self._sampler_of(lora).engine
        engine.load(folder)
        self._note(version, lora, self._copies.take(engine))
        self._sampler_of(lora).version = version
        self._send(version)

    def _send(self, version: str) -> None:
        """Give a version to the servers that sample. Raises UserError, and the version is forgotten."""
        if self._rank0 is None or self._folder is None:
            return
        folder = self._folder / str(self._versions[version][1])
        try:
            self.sampler(version).engine.export_adapter(folder)
            self._rank0.run(lambda: self._publish(version, folder))
        except UserError:
            self.drop_version(version)
            raise

    def drop_version(self, version: str) -> None:
        lora, number = self._versions.pop(version)
        self._copies.drop(number)
        if self._rank0 is not None:
            self._rank0.run(lambda: self._forget(version))
        if (sampler := self._samplers.get(lora)) is not None and sampler.version == version:
            sampler.version = ""

    def sampler(self, version: str) -> Sampler:
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

    def _note(self, version: str, lora: LoraConfig, number: int) -> None:
        if version in self._versions:  # it is in flight, and has new weights
            self.drop_version(version)
        self._versions[version] = lora, number

    def _sampler_of(self, lora: LoraConfig) -> Sampler:
        if lora not in self._samplers:
            engine = self._base if lora == self._base.config.lora else self._base.adapter(lora)
            self._samplers[lora] = Sampler(engine, self._concurrency)
        return self._samplers[lora]


def reset_optimizer(engine: Engine) -> None:
    """Let the moments of AdamW, and its count of steps, begin anew."""
    for part in engine.optimizer.chained_optimizers:
        for group in part.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in part.optimizer.state.values():
            for name, value in state.items():
                state[name] = value.zero_() if isinstance(value, Tensor) else 0
