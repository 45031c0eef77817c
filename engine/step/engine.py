"""Engine: forward_backward and optim_step, the two verbs at which SFT and RL meet."""

import copy
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor, nn

from isoloss.engine.batching.balance import CostModel, Plan
from isoloss.engine.batching.packing import PackedBatch
from isoloss.engine.batching.plan import plan_step, planned
from isoloss.engine.batching.sample import Sample, check_routes, check_tokens
from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.checkpoint.adapter_folder import export_adapter
from isoloss.engine.checkpoint.writer import HostCopies
from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config, OptimConfig
from isoloss.engine.instruments import startup
from isoloss.engine.instruments.profiling import phase
from isoloss.engine.memory.offload import Offloader
from isoloss.engine.step import moe_balancing, replica_check
from isoloss.engine.step.forward_backward import Head, Pass, StepMetrics, run_inputs, run_steps, run_targets
from isoloss.engine.step.losses import Loss, LossLike, Term, as_loss, negative_log_likelihood
from isoloss.engine.step.model_source import ModelSource, digest, factors_of, resolve
from isoloss.engine.step.optimizer import Gather, Overlap, clip_gradients, global_grad_norm, set_hyperparameters
from isoloss.engine.step.prompts import PromptLogprobs, prompt_head, prompt_samples, read_prompts
from isoloss.engine.step.sequence_sums import KnownSums, calls_sums, known_sums
from isoloss.engine.step.step_batch import StepBatch, prepare_step
from isoloss.engine.step.together import run_calls
from isoloss.engine.step.trained import Trained
from isoloss.models.lora.adapter import Adapter
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.frozen import FrozenModel
from isoloss.models.mcore.build import accumulate_in_embedding, accumulate_in_products
from isoloss.models.mcore.layer_config import BuildOptions
from isoloss.models.mcore.layers.value_head import CriticWeights
from isoloss.models.mcore.moe.router_losses import ChoiceCounts, RouterLosses
from isoloss.models.mcore.stages import stage_layers
from isoloss.models.mcore.weight_stream import Receives
from isoloss.models.model import Model, own_data
from isoloss.models.weights import manifest
from isoloss.models.weights.hf_checkpoint import WeightSource
from isoloss.parallel import Mesh, UserError
from isoloss.parallel.aggregation import Aggregation
from isoloss.parallel.collectives import gather_objects
from isoloss.parallel.ops import flash_attention
from isoloss.parallel.runtime import process_group

TARGETS = Loss((Term(negative_log_likelihood, Aggregation("sum")),))  # where only the targets matter
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True)
class OptimResult:
    """The result of an optimizer step.

    grad_norm: global norm before clipping.
    applied: False if loss or gradient were not finite, or N = 0.
    seconds: duration of reduction and step.
    """

    grad_norm: float
    lr: float
    applied: bool
    seconds: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Limits of a step: one that exceeds any is reported and not applied."""

    loss: float = math.inf
    grad_norm: float = math.inf


class Engine:
    """A model on a mesh, with its optimizer.

    source: the result of `resolve(config)`; None: resolve it here.
    critic_of: build a critic, the same model with a value head, on the mesh of this other engine.

    Every rank calls every method with the same arguments: all samples of a step, or a `Holder` of them, such as
    `RankZeroSamples`. The plan then decides, purely from their lengths, which rank sees which.
    Raises UserError (from the constructor, before any process group exists) for a layout the model does not admit.
    """

    def __init__(self, config: Config, source: ModelSource | None = None, *, critic_of: "Engine | None" = None):
        self.config = config
        self.source = source or resolve(config)
        # Tokens that end a reply of this model; an export declares them in addition to those of `source`.
        self.stop_token_ids: Sequence[int] = ()
        self.arch, weights, layout = self.source.arch, self.source.weights, self.source.layout
        startup.prepare(config)
        process_group.choose_kernels(deterministic=config.train.deterministic)
        if critic_of is None:
            flash_attention.activate(config.kernels.attention)
            process_group.init_process_group()
            self.mesh = Mesh.create(layout, config.parallel.cp_kernel)
        else:
            self.mesh = critic_of.mesh
            self.arch, weights = self.arch.as_critic(), CriticWeights(weights)
        self.device = torch.device(torch.cuda.current_device())
        if critic_of is None and not config.model.from_scratch and (self.source.path / manifest.NAME).is_file():
            checkpoint.verify(self.source.path)  # plain Megatron-Core writes no checksums to compare with
        model = Model.build(
            self.arch,
            self.mesh,
            DTYPES[config.train.precision],
            stage_layers(self.arch, layout, config.parallel.stage_layers),
            BuildOptions(
                config.memory,
                config.kernels,
                te=config.model.transformer_engine,
                dispatcher=config.moe.dispatcher,
                deterministic=config.train.deterministic,
            ),
        )
        on_gpu = model.tensors()[0].is_cuda
        if config.accumulates_in_products(on_gpu=on_gpu):
            accumulate_in_products(model.modules)
        if not on_gpu and config.lora.rank == 0:
            accumulate_in_embedding(model.modules)
        _load(model, weights)
        self._frozen = FrozenModel(model) if config.lora.rank > 0 else None
        self.trained = self._trained(model)
        # An adapter's model is frozen: nothing is wrapped around it.
        self.model = model if self._frozen else dataclasses.replace(model, chunks=self.trained.chunks)
        # The schedule must not reduce: several forward_backward calls can precede one optim_step.
        model.modules[0].config.finalize_model_grads_func = None
        self.cost_model = CostModel.of(self.arch, config.lora)
        self.load_balancing = moe_balancing.configured(config.moe, self.arch)
        self._weights = Offloader(self.device, self.model.tensors)
        self.zero_grad()

    def adapter(self, lora: LoraConfig, optim: OptimConfig | None = None) -> "Engine":
        """Return an engine that trains another adapter of this engine's model, with steps and checkpoints of its own.

        The engines share the model, and calls may alternate: to the last bit each computes what it would alone.
        `forward_backward_together` puts micro-batches of several into one schedule, and `offload_adapter` lets one wait
        in host memory.

        lora: keys of the new adapter.
        optim: numbers of its optimizer; None: this engine's.
        Raises UserError where this engine trains its model (lora.rank=0) or a critic's head, and as the constructor
        does for the keys.
        """
        if self._frozen is None or self.arch.critic or lora.rank == 0:
            raise UserError(
                "adapter() shares a frozen model: make the engine with lora.rank above 0, not of a critic, and give "
                "each adapter a rank"
            )
        other = copy.copy(self)
        other.config = dataclasses.replace(self.config, lora=lora, optim=optim or self.config.optim)
        rules.check(other.config, self.arch, self.mesh.layout)
        other.source = dataclasses.replace(self.source, factors=factors_of(other.config, self.arch))
        other.cost_model = CostModel.of(self.arch, lora)
        other.trained = other._trained(self.model)
        other.zero_grad()
        return other

    # ---- the two verbs ----------------------------------------------------------------------------------------------

    def forward_backward(self, samples: Sequence[Sample], loss: LossLike) -> StepMetrics:
        """Accumulate the gradient of the samples' loss; nothing is reduced yet.

        loss: a `Loss`, or a function of `TokenInputs` that returns one number per target, [N], which the configured
            loss.aggregation weights; here, in `train_step` and in `evaluate`.

        A mean aggregation needs all samples of the optimizer step in one call; several calls before a step ask for
        `sum`. Raises ValueError where a second call has a mean, or comes after `reduce_gradients` or `gradients`, and
        where samples of one trajectory contradict each other. All samples of a trajectory are in one call.

        With `loss.outputs` the pass also returns these values at every target, such as log-probabilities.
        Collectives: one all-reduce of counts over dp, those of the model, one all-reduce of metrics; here and in every
        method that reads weights, after a step, the all-gather of the stepped weights (`Gather`).
        """
        return self._forward_backward(samples, loss)

    @phase("optimizer")
    def optim_step(
        self,
        lr: float | None = None,
        max_grad_norm: float = math.inf,
        *,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        clip: float | None = None,
    ) -> OptimResult:
        """Reduce the accumulated gradients (plain sums over dp x context), clip, and step; move selection biases.

        A non-finite loss or gradient, or a step without a valid token, is reported and not applied.

        lr, betas, eps, weight_decay, clip: AdamW's numbers and the largest norm of the gradient (0: any), for this step
            only; default the configured ones. Raises UserError where one is out of its bounds.
        max_grad_norm: largest norm, before clipping, of a gradient that is applied; a step above it is not.
        Collectives: the gradient reduction, one all-reduce of the norm, and with moe.bias_update_rate one of the
            experts' loads.
        """
        self.trained.check_own()
        started = time.perf_counter()
        given = {"lr": lr, "betas": betas and tuple(betas), "eps": eps, "weight_decay": weight_decay, "clip": clip}
        given = {name: value for name, value in given.items() if value is not None}
        optim = dataclasses.replace(self.config.optim, min_lr=0.0, **given)
        self.reduce_gradients()
        self.optimizer.prepare_grads()
        norm = global_grad_norm(self.optimizer)
        applied = self.trained.finite and math.isfinite(norm) and norm <= max_grad_norm and self.trained.tokens > 0
        if applied:
            clip_gradients(self.optimizer, norm, optim.clip)
            set_hyperparameters(self.optimizer, optim)
            with self.gather.defer():
                self.optimizer.step_with_ready_grads()
            if self.load_balancing is not None:
                moe_balancing.update_biases(self.model.chunks, self.load_balancing.bias_rate, self.mesh)
        self.zero_grad()
        return OptimResult(norm, optim.lr, applied, time.perf_counter() - started)

    def train_step(
        self, samples: Sequence[Sample], loss: LossLike, lr: float | None = None, limits: Limits = Limits()
    ) -> tuple[StepMetrics, OptimResult]:
        """Call forward_backward and optim_step in one, with the gradient reduction overlapped if so configured.

        With `moe.dispatch_bound` the host does not wait for the sizes of messages between experts. Where one of them
        had no room for a token, on whatever rank, all ranks forget the step and run it again without a bound, so
        nothing depends on it.
        """

        def step(metrics: StepMetrics) -> OptimResult:
            return self.optim_step(lr, limits.grad_norm if metrics.loss <= limits.loss else -math.inf)

        # What earlier calls accumulated could not be kept if this one were forgotten.
        bound = None if self.trained.modes else self.config.moe.dispatch_bound
        try:
            with self.overlap.reduce_during_backward():
                metrics = self._forward_backward(samples, loss, bound)
                result = None if metrics.lost else step(metrics)
            if result is None:
                wasted = metrics.seconds
                self.zero_grad()  # once what has begun to be reduced has been waited for
                with self.overlap.reduce_during_backward():
                    metrics = self.forward_backward(samples, loss)
                    result = step(metrics)
                metrics = dataclasses.replace(metrics, seconds=wasted + metrics.seconds, reruns=1)
            elif bound is not None:
                metrics = dataclasses.replace(metrics, reruns=0)
        except BaseException:
            self.zero_grad()  # of a step that failed nothing stays, so that the next one can be taken
            raise
        return metrics, result

    # ---- more verbs -------------------------------------------------------------------------------------------------

    def evaluate(self, samples: Sequence[Sample], loss: LossLike) -> StepMetrics:
        """Compute the loss of the samples without gradients, normalized and with outputs as in a training step."""
        loss = as_loss(loss, self.config.loss)
        batch = self._prepare(samples, loss)
        known = self._first_pass(batch, samples, loss)
        with torch.no_grad():
            return run_steps(self.model, [Pass(batch, loss, known=known)], forward_only=True)[0]

    def logprobs(self, samples: Sequence[Sample], temperature: float = 1.0) -> list[Tensor]:
        """Return log p(target | tokens before it) for every target of every sample: fp64 of the shape of its targets,
        [T] or [T, K], each; 0 where mask_T is False.

        p is softmax(logits / temperature). Every rank gets all of them; activations of one micro-batch at a time.
        Collectives: one all-reduce of counts over dp, those of the model, one all-reduce over dp x context and one over
        pp.
        """

        def head(micro_batch: PackedBatch, hidden: Tensor) -> Tensor:
            at, targets_N = micro_batch.labelled_N, micro_batch.targets_N
            return self.model.logprobs(hidden, at, targets_N, temperature=temperature)[0]

        return self._of_targets(head, samples, None)

    def prompt_logprobs(self, prompts: Sequence[Sequence[int]], top_k: int = 0) -> list[PromptLogprobs]:
        """Return the log-probability of every token of every prompt, by token ids, under softmax(logits).

        top_k: number of the most probable tokens to name at each place, with their log-probabilities.
        Raises UserError for a prompt without tokens or beyond the vocabulary. Logits are of a few positions at a time,
        and of this rank's part of the vocabulary. Collectives as `logprobs`.
        """
        samples = prompt_samples(prompts, top_k, self.arch.vocab_size)
        rows = self._of_targets(partial(prompt_head, self.model, top_k), samples, (1 + 2 * top_k,))
        return [*read_prompts(rows, top_k)]

    def values(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return a critic's expected return before every target of every sample: [T] fp64 each, 0 where mask_T is
        False.

        Collectives as `logprobs`.
        """
        return self._of_targets(lambda row, hidden: self.model.values(hidden, row.labelled_N), samples)

    def logits(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the logits that predict each target of every sample: [T, vocab_size] fp64 each, 0 where mask_T is
        False.

        For looking at small models: everything is held at once, on every rank. Collectives as `logprobs`.
        """
        shape = (self.arch.vocab_size,)
        return self._of_targets(lambda row, hidden: self.model.logits(hidden, row.labelled_N), samples, shape)

    def zero_grad(self) -> None:
        """Forget the accumulated gradients and the experts' loads: a new step begins."""
        self._come_back()
        self.trained.zero_grad()
        moe_balancing.forget_loads(self.model.chunks)

    @phase("reduce gradients")
    def reduce_gradients(self) -> None:
        """Sum the accumulated gradients over dp x context, and the shared ones over tp and pp; once a step."""
        if not self.trained.reduced:
            self.return_to_device()
            self.trained.reduce_gradients()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole gradients of this rank's weights, after `reduce_gradients`, one at a time.

        Not with the distributed optimizer, whose ranks hold pieces. Collective over tp and etp.
        """
        if self.config.distributed_optimizer:
            raise ValueError(
                "gradients() needs parallel.distributed_optimizer=false: its ranks hold only pieces of them"
            )
        self.reduce_gradients()
        holds = self.trained.adapter or self.model
        for owned, gradient in holds.whole_tensors(lambda p: getattr(p, "main_grad", p)):
            if owned.weight.trained:
                yield owned.weight.name, gradient

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole weights of this rank (its stage and experts); then those of an adapter. Collective over
        tp and etp."""
        self._whole_weights()
        yield from self.model.weights()
        if self.trained.adapter is not None:
            yield from ((owned.weight.name, whole) for owned, whole in self.trained.adapter.whole_tensors())

    def weight_stream(self, bucket_bytes: int, receives: Receives) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield every weight, whole, under its Hugging Face name, in buckets, on the ranks that `receives` names.

        In the precision of training, an adapter merged into its weights. Collective over the world: every rank exhausts
        the iterator.
        """
        self._whole_weights()
        adapter = self.trained.adapter
        of = adapter.merged if adapter else own_data
        yield from self.model.weight_stream(bucket_bytes, receives, of=of)

    def adapter_stream(self, bucket_bytes: int, receives: Receives) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield every factor of the adapter, whole, under PEFT's name without its prefix, as `weight_stream` yields
        weights. Collective over the world: every rank exhausts the iterator."""
        if self.trained.adapter is None:
            raise UserError("lora.rank=0: the model has no adapter; weight_stream() sends its weights")
        self._whole_weights()
        yield from self.trained.adapter.stream(bucket_bytes, receives)

    def check_replicas(self, world: dist.ProcessGroup, after: str) -> None:
        """Raise DivergedError where ranks that should hold the same weights do not (`replica_check`)."""
        self._whole_weights()
        adapter = self.trained.adapter
        replica_check.check_replicas(self.model, world, after, adapter.owned() if adapter else ())

    def save(self, folder: str | Path, extra: Mapping[str, object] | None = None) -> None:
        """Write a checkpoint of weights, optimizer and rank 0's `extra`, for any layout. Collective over the world."""
        self.stage(folder, extra).write()

    def stage(
        self, folder: str | Path, extra: Mapping[str, object] | None = None, copies: HostCopies | None = None
    ) -> checkpoint.Staged:
        """Take a checkpoint to host memory, for `write` to put into the folder. Collective over the world.

        copies: pool for copies of tensors of the host, so that the engine may go on before `write`; None: no copies.
        """
        self.trained.check_own()
        self.return_to_device()
        return checkpoint.stage(
            Path(folder), self._held(), self.optimizer, self.source.side_files, extra or {}, copies, self.stop_token_ids
        )

    def load(self, folder: str | Path) -> dict[str, object]:
        """Load a checkpoint written by `save`, in any layout; returns its `extra`. Collective over the world.

        Raises UserError for an adapter of another model, rank, scale or targets.
        """
        self.trained.check_own()
        self.return_to_device()
        return checkpoint.load(Path(folder), self._held(), self.optimizer)

    def export_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face folder that transformers and every server load; of a multimodal model, its text model.
        Collective over the world."""
        if self.trained.adapter is not None:
            raise UserError(
                f"lora.rank={self.config.lora.rank}: export_hf() writes no adapter; write it by export_adapter(), and "
                "merge it with isoloss-convert merge"
            )
        self._whole_weights()
        checkpoint.export_hf(Path(folder), self.model, self.source.own_dtypes)
        if dist.get_rank() == 0:
            self.source.side_files.write(folder, self.arch.text_only(), self.stop_token_ids)
        dist.barrier()

    def export_adapter(self, folder: str | Path) -> None:
        """Write the adapter as PEFT's folder, which transformers and servers load with the model of model.path.

        Raises UserError without an adapter (lora.rank=0), or if the folder holds one. Collective over the world.
        """
        if self.trained.adapter is None:
            raise UserError("lora.rank=0: the model has no adapter to export; export_hf() writes the model")
        self._whole_weights()
        export_adapter(Path(folder), self.trained.adapter, self.source.path)

    # ---- memory of the device, for others ---------------------------------------------------------------------------

    def offload(self, *, weights: bool = True) -> None:
        """Give the memory of the gradients, of the optimizer's state and of the weights to others, between two steps.

        State and weights are kept in pinned host memory, unchanged. Every method onloads the memory that it needs. An
        exception before that loses nothing. No collectives: ranks that must all have left have to meet.

        weights: False: they stay.
        Raises ValueError amid a step, whose gradients would be lost.
        """
        if self.trained.modes:
            raise ValueError("offload() after forward_backward: call optim_step() or zero_grad() first")
        self.trained.memory.leave()
        self.gather.wait_for_launched()  # weights in pieces may leave, and be gathered when they are back
        if weights:
            self.trained.weights.leave()
            self._weights.leave()

    def offload_adapter(self) -> None:
        """Give the memory of an adapter to others, with its gradients and optimizer state, and leave the model where it
        is. Raises ValueError as `offload`."""
        self.offload(weights=False)
        self.trained.weights.leave()

    def return_to_device(self) -> None:
        """Take the memory back, where `offload` gave it away, with whole weights in it. Collective as `Gather`."""
        self._come_back()
        self.gather.wait()

    # ---- how --------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        layers, precision = self.arch.num_layers, self.config.train.precision
        return (
            f"Engine({str(self.source.path)!r}, {layers} layers, {precision}, layout {self.mesh.layout}, {self.device})"
        )

    @property
    def chunks(self) -> Sequence[nn.Module]:
        """Return the model's chunks, as the schedule calls them."""
        return self.model.chunks

    @property
    def optimizer(self) -> ChainedOptimizer:
        """Return Megatron's optimizer of the trained parameters."""
        return self.trained.optimizer

    @property
    def overlap(self) -> Overlap:
        """Return the switch by which a backward reduces gradients."""
        return self.trained.overlap

    @property
    def gather(self) -> Gather:
        """Return the gather of the weights that a step leaves in pieces."""
        return self.trained.gather

    @property
    def shares_prefixes(self) -> bool:
        """Return whether the tokens with which samples of a micro-batch begin alike are computed once."""
        return rules.shares_prefixes(self.config)

    def plan(self, samples: Sequence[Sample]) -> Plan:
        """Return the plan of whole samples; the same on every rank. Raises UserError where a token or a target of one
        is no token of the model, or its routes name no experts of it."""
        check_tokens(samples, self.arch.vocab_size)
        experts = self.arch.experts
        check_routes(samples, *((sum(self.arch.sparse), experts.count, experts.top_k) if experts else (0, 0, 0)))
        limits = self.mesh.layout, self.config.batch.max_tokens, self.cost_model
        return plan_step(samples, *limits, share_prefixes=self.shares_prefixes)

    def _held(self) -> checkpoint.Holds:
        """Return what a checkpoint holds: the model, or its adapter with a fingerprint of the model, which the first
        call computes. Collective over the world."""
        adapter = self.trained.adapter
        if adapter is None:
            return self.model
        assert self._frozen is not None
        self._frozen.digest = self._frozen.digest or digest(self.source)
        return adapter

    def _trained(self, model: Model) -> Trained:
        """Return the part of the model that is trained. Collective as Megatron's optimizer."""
        adapter = None
        if self._frozen is not None:
            adapter = Adapter(self._frozen, self.config.lora)
            _load(adapter, self.source.factors)
        return Trained(model, self.config, adapter)

    def _activate(self) -> None:
        """Let the model compute with what this engine trains."""
        if self.trained.adapter is not None:
            self.trained.adapter.activate()

    def _come_back(self) -> None:
        self._weights.onload()
        self.trained.weights.onload()
        self.trained.memory.onload()

    def whole_model(self) -> Model:
        """Return the model, once its weights are on the device and gathers in flight have arrived, with this engine's
        adapter."""
        self._whole_weights()
        self._activate()
        return self.model

    def _whole_weights(self) -> None:
        self._weights.onload()
        self.trained.weights.onload()
        self.gather.wait()

    def _prepare(self, samples: Sequence[Sample], loss: Loss) -> StepBatch:
        if not self.mesh.usable:
            raise ValueError(
                "this Engine lost its process groups to a later one: with several ranks, a process has one at a time"
            )
        self._come_back()
        self._activate()
        plan, samples = planned(samples, self.plan)
        batch = prepare_step(samples, loss, plan, self.mesh, self.device)
        self.gather.launch()  # after the counts: the host waits for those, and they take their turn in the same group
        costs = [self.cost_model.cost_of_spans(spans) for spans in batch.spans]
        return dataclasses.replace(batch, cost=costs[self.mesh.dp.rank()], total_cost=sum(costs))

    def _of_targets(self, head: Head, samples: Sequence[Sample], shape: tuple[int, ...] | None = ()) -> list[Tensor]:
        """Return the output of `head` for every labelled position, sample by sample.

        shape: shape of the output of one position; None: that of its targets.
        """
        batch = self._prepare(samples, TARGETS)
        with torch.no_grad():
            flat = run_targets(self.model, batch, head, batch.target_shape if shape is None else shape)
        return list(flat.split([len(s) for s in samples]))

    @phase("forward and backward")
    def _forward_backward(
        self, samples: Sequence[Sample], loss: LossLike, dispatch_bound: float | None = None
    ) -> StepMetrics:
        """Accumulate the gradient, worth nothing where `lost` of the metrics is not 0.

        dispatch_bound: bound of messages between experts.
        """
        return run_calls([(self, samples, loss)], dispatch_bound)[0]

    def new_pass(self, samples: Sequence[Sample], loss: LossLike) -> Pass:
        """Return the pass of a call of `forward_backward`. Collective as `forward_backward` before the model's."""
        loss = as_loss(loss, self.config.loss)
        self._check_call(loss)
        batch, router_losses = self._prepare(samples, loss), None
        if self.load_balancing is not None:
            router_losses = moe_balancing.start_step(self.load_balancing, batch, loss, self.device)
        return Pass(batch, loss, router_losses, self._activate, self._first_pass(batch, samples, loss, router_losses))

    def _first_pass(
        self, batch: StepBatch, samples: Sequence[Sample], loss: Loss, router_losses: RouterLosses | None = None
    ) -> KnownSums | None:
        """Find what the pass reads of whole sequences, where their samples are in several micro-batches: return sums of
        the loss and its slopes (None where it has no sums, and on stages without a loss), and give the routers' losses
        the choices of experts. Collectives: where something is read, the model's, and those of `known_sums` and
        `reduce_choices`."""
        if not batch.spread:
            return None
        sums = calls_sums(loss, samples[0].fields, target_shape=batch.target_shape, critic=self.arch.critic)
        counts = None
        if router_losses is not None and router_losses.read_choices:
            counts = ChoiceCounts(batch.sequences)
        if not sums and counts is None:
            return None
        parts = run_inputs(self.model, batch, loss, counts)
        if router_losses is not None and counts is not None:
            router_losses.chosen = moe_balancing.reduce_choices(counts, self.mesh)
        if not (sums and parts):
            return None
        return known_sums(loss, parts, batch.sequences, batch.total_tokens, self.mesh.dp_context)

    def _check_call(self, loss: Loss) -> None:
        """Raise ValueError where this call of `forward_backward` would make the gradient of the step wrong."""
        self.trained.check_own()
        if self.trained.reduced:
            raise ValueError(
                "forward_backward after reduce_gradients() or gradients(): ranks would not sum what it adds; call "
                "optim_step() or zero_grad() first"
            )
        before, modes = self.trained.modes, [aggregation.mode for aggregation in loss.aggregations]
        means = [mode for mode in before + modes if mode != "sum"]
        if before and means:
            raise ValueError(
                f"several calls of forward_backward before optim_step() would add up means of {means[0]}: give all "
                "samples of the step in one call, or use the aggregation sum in every call"
            )
        self.trained.modes = before + modes


def _load(model: Model | Adapter, weights: WeightSource) -> None:
    """Fill a model, or an adapter, on every rank. Raises UserError on all ranks where one finds a bad weight, so that
    none waits for others. Collectives: one all-gather over the world."""
    problem: UserError | None = None
    try:
        model.load(weights)
    except UserError as error:
        problem = error
    for rank_problem in gather_objects(problem):
        if rank_problem:
            raise rank_problem
