"""Which attention kernel a run gets. What the kernels are asked is in test_block_attention.py."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention

from isoloss.parallel.ops import flash_attention


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A GPU of a capability, with or without the package; gives what PyTorch was told to call."""

    def make(capability: int, *, installed: bool) -> list[str]:
        activated: list[str] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
        monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append)
        if installed:
            (tmp_path / "flash_attn_interface.py").touch()
            monkeypatch.syspath_prepend(tmp_path)
        return activated

    return make


@pytest.mark.parametrize(
    ("wanted", "capability", "installed", "version"),
    [
        ("auto", 9, True, "fa3"),
        ("auto", 9, False, "fa2"),
        ("auto", 8, True, "fa2"),
        ("auto", 10, True, "fa2"),
        ("fa2", 9, True, "fa2"),
        ("fa3", 9, True, "fa3"),
        ("blocks", 9, True, "fa2"),
    ],
)
def test_the_third_version_is_for_hopper_gpus_where_it_is_installed(machine, wanted, capability, installed, version):
    activated = machine(capability, installed=installed)
    assert flash_attention.version(wanted) == version
    flash_attention.activate(wanted)
    assert activated == (["FA3"] if version == "fa3" else [])


def test_an_older_pytorch_has_no_third_version(machine, monkeypatch):
    machine(9, installed=True)
    assert flash_attention.has_fa3()
    monkeypatch.delattr(attention, "list_flash_attention_impls")
    assert not flash_attention.has_fa3() and flash_attention.version("auto") == "fa2"


def test_run_json_says_which(machine):
    assert flash_attention.description("auto", "bf16") == "PyTorch's kernel of the CPU"
    machine(9, installed=True)
    assert flash_attention.description("auto", "bf16") == "FlashAttention 3"
    assert flash_attention.description("fa2", "bf16") == "FlashAttention 2"
    for wanted, precision in (("auto", "fp32"), ("blocks", "bf16")):
        assert flash_attention.description(wanted, precision) == "products by blocks of queries"


@pytest.mark.parametrize(
    ("cuda", "dtype", "width", "taken"),
    [
        (True, torch.bfloat16, 128, True),
        (True, torch.float16, 256, True),
        (True, torch.bfloat16, 257, False),
        (True, torch.float32, 128, False),
        (True, torch.float64, 128, False),
        (False, torch.bfloat16, 128, False),
    ],
)
def test_there_are_kernels_for_16_bit_numbers_on_a_gpu(cuda, dtype, width, taken):
    query = SimpleNamespace(is_cuda=cuda, dtype=dtype, shape=(5, 2, width))
    assert flash_attention.takes(query) == taken  # pyright: ignore[reportArgumentType]
