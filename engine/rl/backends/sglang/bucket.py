"""A bucket of weights as SGLang takes it: one tensor of bytes, and where each weight lies in it."""

import base64
import io
import threading
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pickle import Pickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, reductions, set_sharing_strategy

from isoloss.engine.rl.backends.protocol import Bucket

METADATA_MODULE = "sglang.srt.weight_sync.tensor_bucket"
_STRATEGY = threading.Lock()
DEVICE = 6  # position of the device among the arguments of torch's rebuild_cuda_tensor


class FlattenedTensorMetadata:
    """The place of a tensor in the bytes of a bucket. Travels under the name of SGLang's class (`serialize`)."""

    def __init__(self, name: str, tensor: Tensor, start: int):
        self.name = name
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.start_idx = start
        self.end_idx = start + tensor.nbytes
        self.numel = tensor.nbytes


@dataclass(frozen=True)
class FlatBucket:
    """flat_bytes: the bytes of a bucket's tensors. layout: where each lies in them."""

    flat_bytes: Tensor
    layout: tuple[FlattenedTensorMetadata, ...]


def flatten(bucket: Bucket) -> FlatBucket:
    """The bucket's tensors in one. Wider types come first: each then begins at a multiple of its item size, without
    which its bytes could not be viewed as that type."""
    layout, parts, start = [], [], 0
    for name, tensor in sorted(bucket, key=lambda pair: -pair[1].element_size()):
        layout.append(FlattenedTensorMetadata(name, tensor, start))
        parts.append(tensor.detach().reshape(-1).view(torch.uint8))
        start += tensor.nbytes
    return FlatBucket(torch.cat(parts), tuple(layout))


def serialize(bucket: FlatBucket, *, in_memory: bool = True) -> str:
    """The handle to a bucket as SGLang reads it: base64 of a pickle whose tensor is a reference to shared memory, which
    is this machine's; with in_memory=False its bytes.

    The pickle names SGLang's class for the layout, which need not be installed here. In protocol 2 a class is spelt
    out as "c<module>\\n<name>\\n", without a length before it, so the module can be exchanged in the bytes.
    """
    with _STRATEGY:  # of the process: of two threads the second would take the first one's for what was before
        strategy = get_sharing_strategy()
        # The default strategy passes a file descriptor by a socket that only our own children may open.
        set_sharing_strategy("file_system")
        try:
            buffer = io.BytesIO()
            pickler = _Pickler(buffer, 2) if in_memory else Pickler(buffer, 2)
            pickler.dump({"flattened_tensor": bucket.flat_bytes, "metadata": list(bucket.layout)})
        finally:
            set_sharing_strategy(strategy)
    ours, theirs = (f"c{module}\nFlattenedTensorMetadata\n".encode() for module in (__name__, METADATA_MODULE))
    return base64.b64encode(buffer.getvalue().replace(ours, theirs)).decode()


class _Pickler(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        """A CUDA tensor names its device by UUID, as SGLang expects: the two processes may number devices otherwise."""
        if not (isinstance(obj, Tensor) and obj.is_cuda):
            return NotImplemented
        rebuild, args = reductions.reduce_tensor(obj)
        arguments: list[Any] = list(args)
        arguments[DEVICE] = str(torch.cuda.get_device_properties(arguments[DEVICE]).uuid)
        return rebuild, tuple(arguments)
