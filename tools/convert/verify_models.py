"""The two models that `--verify` compares: logits by isoloss from a checkpoint, and by transformers from a folder."""

import contextlib
import gc
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss.engine.batching.balance import Plan
from isoloss.engine.batching.packing import PackedBatch
from isoloss.engine.batching.sample import Sample
from isoloss.engine.step.forward_backward import run_targets
from isoloss.engine.step.losses import Loss, negative_log_likelihood
from isoloss.engine.step.step_batch import prepare_step
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import read_architecture, read_config
from isoloss.models.kinds.weight import Weight
from isoloss.models.mcore.moe.router import Router
from isoloss.models.model import Model
from isoloss.models.weights.hf_checkpoint import HFReader, WeightSource, harmless
from isoloss.parallel import Layout, Mesh, mesh
from isoloss.parallel.runtime import process_group

OTHER_CHUNK = 16  # tokens; the chunk of transformers has 64


class Unverified(Exception):
    """A conversion that failed verification. The message is one line: the check that failed, and its numbers."""


class Rounded:
    """A source of weights, rounded to the types of the other format, which may be narrower."""

    def __init__(self, source: WeightSource, dtypes: Mapping[str, torch.dtype]):
        """dtypes: the types of the weights, by name."""
        self._source, self._dtypes = source, dtypes

    def whole(self, weight: Weight) -> Tensor:
        return self._source.whole(weight).to(self._dtypes[weight.name])


class IsolossModel:
    """A model of one rank in fp32, forward only.

    visited: for each layer with experts, bool [E], whether a token so far was sent to the expert."""

    def __init__(self, arch: Architecture, source: WeightSource, own_mesh: Mesh):
        self._model = Model.build(arch, own_mesh, torch.float32)
        self._model.load(source)
        self.visited: dict[int, Tensor] = {}
        for layer, block in enumerate(self._model.modules[0].decoder.layers):
            for module in block.modules():
                if isinstance(module, Router):
                    self.visited[layer] = torch.zeros(module.experts.count, dtype=torch.bool)
                    module.register_forward_hook(self._watch(layer))

    def logits(self, tokens_T: Tensor, targets_N: Tensor) -> Tensor:
        """Return the logits that predict tokens_T[targets_N], [N, vocabulary] fp32 on the CPU."""
        mask_T = torch.zeros(len(tokens_T), dtype=torch.bool)
        mask_T[targets_N] = True
        device = torch.device(torch.cuda.current_device())
        loss = Loss.of(negative_log_likelihood, aggregation="sum")
        plan = Plan.apart((((0,),),), [len(tokens_T)])
        batch = prepare_step([Sample(tokens_T, mask_T)], loss, plan, self._model.mesh, device)
        with torch.no_grad():
            logits = run_targets(self._model, batch, self._head, (self._model.arch.vocab_size,))
        return logits[targets_N].float().cpu()

    def _head(self, micro_batch: PackedBatch, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden, micro_batch.labelled_N)

    def _watch(self, layer: int):
        def note(module: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
            self.visited[layer] |= outputs[1].any(0).cpu()

        return note


@contextlib.contextmanager
def isoloss_model(arch: Architecture, source: WeightSource) -> Iterator[IsolossModel]:
    """Build the model in a world of this process alone; both are destroyed afterwards."""
    process_group.init_process_group()
    try:
        yield IsolossModel(arch, source, Mesh.create(Layout()))
    finally:
        mesh.destroy()
        dist.destroy_process_group()
        gc.collect()


class TransformersModel:
    """The model of a Hugging Face folder in fp32, its weights rounded to `dtype` first if there is one.

    Raises Unverified where the folder lacks a tensor of the model or holds another one.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None):
        import transformers

        transformers.utils.logging.disable_progress_bar()  # two lines of bars in a log
        # By the name in the file, if transformers has it: AutoModelForCausalLM does not find every one of its classes.
        (name,) = read_config(folder)["architectures"]
        loaded: Any = getattr(transformers, name, transformers.AutoModelForCausalLM).from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to learn them from it, rather than from a table
        )
        model, info = loaded
        reader, arch = HFReader(folder), read_architecture(folder)
        info["unexpected_keys"] = [key for key in info["unexpected_keys"] if not harmless(key, reader, arch)]
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[kind]:
                raise Unverified(f"transformers finds {kind} in {folder}: {min(map(str, info[kind]))} and others")
        for parameter in model.parameters() if dtype else ():
            parameter.data = parameter.data.to(dtype).float()
        self._model = model.eval().to(torch.cuda.current_device())
        self._chunk: int | None = None

    def logits(self, tokens_T: Tensor, targets_N: Tensor) -> Tensor:
        """Return logits as `IsolossModel.logits` does."""
        with torch.no_grad():
            tokens = tokens_T[None].to(self._model.device)
            with self._delta_rule():
                return self._model(input_ids=tokens, use_cache=False).logits[0, targets_N - 1].float().cpu()

    def other_kernels(self) -> None:
        """Make the model compute the same in another order from now on, where transformers has a choice."""
        for change in (
            lambda: self._model.set_attn_implementation("sdpa"),
            lambda: self._model.set_experts_implementation("batched_mm"),
        ):
            with contextlib.suppress(ValueError, AttributeError):
                change()
        self._chunk = OTHER_CHUNK

    @contextlib.contextmanager
    def _delta_rule(self) -> Iterator[None]:
        """Change the size of Gated DeltaNet's chunks, which is a constant of a function, to `OTHER_CHUNK` if chosen."""
        module = sys.modules[type(self._model).__module__]
        name = "torch_chunk_gated_delta_rule"
        if self._chunk is None or not hasattr(module, name):
            yield
            return
        rule = getattr(module, name)
        # On a GPU flash-linear-attention wraps the rule, and drops arguments that its kernel does not take.
        setattr(module, name, partial(inspect.unwrap(rule), chunk_size=self._chunk))
        try:
            yield
        finally:
            setattr(module, name, rule)
