"""From the host to the device."""

import torch
from torch import Tensor


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for which the host does not wait: it is made from pinned memory, which PyTorch keeps until
    then. On a CPU the tensor itself."""
    return host.pin_memory().to(device, non_blocking=True)
