"""Copies from the host to the device."""

import torch
from torch import Tensor


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without a wait of the host; on a CPU return the tensor itself.

    PyTorch keeps the pinned memory until the copy is done.
    """
    return host.pin_memory().to(device, non_blocking=True)
