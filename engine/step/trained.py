"""The part of a model that is trained: parameters in Megatron's gradient buffers, their optimizer, and the state of the
step that accumulates. Without adapters that is the model itself, with adapters the factors of one."""

from collections.abc import Sequence

from megatron.core.distributed import finalize_model_grads
from torch import Tensor, nn

from isoloss.engine.config.schema import Config
from isoloss.engine.memory.offload import Offloader
from isoloss.engine.step.optimizer import (
    Gather,
    Overlap,
    build_optimizer,
    gradient_buffers,
    state_tensors,
    wrap_ddp,
)
from isoloss.models.lora.adapter import Adapter
from isoloss.models.model import Model


class Trained:
    """Parameters and their optimizer.

    modules: modules that hold the parameters, without what is wrapped around them: a checkpoint's.
    chunks: the modules in Megatron's DistributedDataParallel.
    adapter: the adapter that the parameters are the factors of; None: they are the model's own.
    weights, memory: tensors that can leave the device: an adapter's weights; gradients and optimizer state.
    reduced: whether ranks have summed the gradients of this step.
    borrowed: whether the parameters have values of another version for a while (`versions`).
    finite, tokens, modes: finiteness, valid tokens and aggregations of the losses that this step has accumulated.
    """

    def __init__(self, model: Model, config: Config, adapter: Adapter | None = None):
        self._model, self.adapter = model, adapter
        self.modules: Sequence[nn.Module] = (adapter or model).modules
        on_gpu = model.device.type == "cuda"
        self.chunks = wrap_ddp(self.modules, config, model.mesh, on_gpu=on_gpu)
        self.optimizer = build_optimizer(self.chunks, config, model.dtype)
        self.overlap = Overlap(self.chunks)
        self.gather = Gather(self.chunks, put_off=config.overlaps_param_gather(on_gpu=on_gpu))
        # Weights that are the model's leave with it.
        self.weights = Offloader(model.device, lambda: self.tensors() if adapter else ())
        self.memory = Offloader(
            model.device,
            lambda: state_tensors(self.optimizer, self.tensors()),
            lambda: gradient_buffers(self.chunks),
        )
        self.reduced, self.finite, self.tokens = False, True, 0
        self.modes: list[str] = []
        self.borrowed = False

    def check_own(self) -> None:
        """Raise ValueError while the parameters have values of another version."""
        if self.borrowed:
            raise ValueError(
                "the engine computes with another version of its weights, which is not to be trained, saved or "
                "replaced: leave WeightVersions.using() first"
            )

    def tensors(self) -> list[Tensor]:
        """Return every parameter and buffer of the modules."""
        return [tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers())]

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.reduced, self.finite, self.tokens, self.modes = False, True, 0, []

    def reduce_gradients(self) -> None:
        """Sum the gradients over dp x context, and those of which ranks have parts over tp and pp; once a step."""
        if self.reduced:
            return
        if self.adapter is None:
            # num_tokens would make Megatron divide: the weights already hold the only division.
            finalize_model_grads([*self.chunks], num_tokens=None, pg_collection=self._model.mesh.megatron)
        else:
            for chunk in self.chunks:
                chunk.finish_grad_sync()
            self.adapter.sum_parts()
        self.reduced = True
