"""The device of a run, and the reason why a GPU of the machine is not used."""

import os

import torch

from isoloss.parallel.runtime import environment
from isoloss.parallel.runtime.errors import UserError
from isoloss.parallel.runtime.nvidia_smi import read_driver


def check(wanted: str) -> None:
    """Refuse a device that this process cannot give. wanted: train.device. Raises UserError."""
    if wanted == "cpu" and torch.cuda.is_available():
        # The stubs for CUDA (`isoloss.parallel.runtime.cuda_stubs`) are chosen at the first import.
        raise UserError(
            f"train.device='cpu' and this process sees {torch.cuda.device_count()} GPU(s): start it with "
            "CUDA_VISIBLE_DEVICES= as well, which hides them"
        )
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(f"train.device='cuda' and torch sees no GPU: {why_no_gpu()}")


def check_fallback(wanted: str) -> None:
    """Refuse to run on the CPU because torch cannot use the GPUs that the driver has. Raises UserError."""
    if wanted != "auto" or torch.cuda.is_available():
        return
    driver = read_driver()
    if driver is not None and driver.gpus:
        raise UserError(
            f"train.device='auto' would run on the CPU: nvidia-smi sees {len(driver.gpus)} GPU(s) ({driver.gpus[0]}, "
            f"driver {driver.version}) and torch does not: {why_no_gpu()}; fix that, or set train.device=cpu"
        )


def describe(world_size: int) -> str:
    """Return the device and the number of devices of a world, for the first lines of a run and run.json."""
    if torch.cuda.is_available():
        return f"{world_size} x {torch.cuda.get_device_name()}"
    return f"CPU, {os.cpu_count()} core(s) a machine for {world_size} rank(s)"


def is_hopper() -> bool:
    """Return True if this process's GPU is of NVIDIA's Hopper generation (H100), which has kernels of its own."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def memory_bytes() -> int | None:
    """Return the memory of this process's GPU; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def peak_bytes() -> int | None:
    """Return the peak bytes of tensors on this process's GPU; None on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def why_no_gpu() -> str:
    """Return torch's reason for not using the GPUs, with the setting that may hide them."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, a torch without CUDA, no devices
        reason = " ".join(str(error).split()).rstrip(".")
    else:
        reason = "it counts 0 of them"
    visible = environment.visible_gpus()
    return (
        f"{reason} (torch {torch.__version__}" + ("" if visible is None else f", CUDA_VISIBLE_DEVICES={visible}") + ")"
    )
