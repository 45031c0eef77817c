"""The device that a run is on, and why it is not the GPU that is there."""

import os
import shutil
import subprocess

import torch

from isoloss.parallel import environment
from isoloss.parallel.errors import UserError


def check(wanted: str) -> None:
    """Refuse a device that this process cannot give. wanted: train.device. Raises UserError."""
    if wanted == "cpu" and torch.cuda.is_available():
        # What stands in for CUDA (`isoloss.parallel.cuda_stubs`) is there, or not, from the first import on.
        raise UserError(
            f"train.device='cpu' and this process sees {torch.cuda.device_count()} GPU(s): start it with "
            "CUDA_VISIBLE_DEVICES= as well, which hides them"
        )
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(f"train.device='cuda' and torch sees no GPU: {_why_no_gpu()}")


def check_fallback(wanted: str) -> None:
    """Refuse to run on the CPU because torch cannot use the GPUs that the driver has. Raises UserError."""
    if wanted != "auto" or torch.cuda.is_available():
        return
    if gpus := _gpus_of_driver():
        raise UserError(
            f"train.device='auto' would run on the CPU: nvidia-smi sees {len(gpus)} GPU(s) ({gpus[0]}) and torch does "
            f"not: {_why_no_gpu()}; fix that, or set train.device=cpu"
        )


def describe(world_size: int) -> str:
    """The device and how many of it a world has, as the opening lines and run.json tell it."""
    if torch.cuda.is_available():
        return f"{world_size} x {torch.cuda.get_device_name()}"
    return f"CPU, {os.cpu_count()} core(s) a machine for {world_size} rank(s)"


def _gpus_of_driver() -> list[str]:
    """Name and driver version of each GPU that nvidia-smi lists; nothing where there is no such command."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    listed = subprocess.run(query, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return [", driver ".join(line.split(", ")) for line in listed.stdout.splitlines()] if listed.returncode == 0 else []


def _why_no_gpu() -> str:
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
