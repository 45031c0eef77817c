"""Products of oneDNN in place of MKL's, against numpy in fp64, in every way that matrices lie in memory."""

import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from isoloss.parallel.ops import matmul
from isoloss.parallel.ops.matmul import add_product, product

INTEL = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: of Intel\n"
AMD = INTEL.replace("GenuineIntel", "AuthenticAMD")
SHAPES = [(7, 12, 5), (33, 2500, 17), (300, 64, 1200), (1, 3, 1), (5, 1, 4)]


def whole(matrix: Tensor) -> Tensor:
    return matrix


def transposed(matrix: Tensor) -> Tensor:
    return matrix.T.contiguous().T


def part(matrix: Tensor) -> Tensor:
    larger = torch.full((matrix.shape[0] + 3, matrix.shape[1] + 5), torch.nan)
    larger[2:-1, 1:-4] = matrix
    return larger[2:-1, 1:-4]


def transposed_part(matrix: Tensor) -> Tensor:
    return part(matrix.T).T


def with_gaps(matrix: Tensor) -> Tensor:
    return torch.stack([matrix, torch.full_like(matrix, torch.nan)], -1)[..., 0]


LIE = [whole, transposed, part, transposed_part, with_gaps]


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    """As on a machine on which it is faster, in blocks smaller than the matrices."""
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(matmul, "NEW_ELEMENTS", 300 * 500)


def exact(left: Tensor, right: Tensor) -> np.ndarray:
    return left.numpy().astype(np.float64) @ right.numpy().astype(np.float64)


def check(found: Tensor, wanted: np.ndarray) -> None:
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=3e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("right_lies", LIE)
@pytest.mark.parametrize("left_lies", LIE)
def test_they_are_numpys(left_lies, right_lies, shape):
    random = torch.Generator().manual_seed(0)
    x, z, y = shape
    left, right = left_lies(torch.randn(x, z, generator=random)), right_lies(torch.randn(z, y, generator=random))
    before = torch.randn(x, y, generator=random)
    with mock.patch.object(matmul, "_onednn", wraps=matmul._onednn) as taken:
        check(product(left, right), exact(left, right))
        out = torch.full((x, 2 * y), torch.nan)
        assert product(left, right, out[:, :y]).data_ptr() == out.data_ptr()
        check(out[:, :y], exact(left, right))
        assert out[:, y:].isnan().all()
        for keep in (True, False):
            total = before.clone()
            add_product(total, left, right, keep=keep)
            check(total, exact(left, right) + before.numpy() * keep)
    assert taken.call_count >= 4


def test_to_a_large_sum_one_product_is_added():
    left, right, total = torch.randn(2500, 300).T, torch.randn(2500, 501), torch.zeros(300, 501)
    with mock.patch.object(matmul, "_onednn", wraps=matmul._onednn) as taken:
        add_product(total[:, :500], left, right[:, :500])
        assert taken.call_count == 3
        add_product(total, left, right, keep=False)
        assert taken.call_count == 4
    check(total, exact(left, right))


@pytest.mark.parametrize("lies", ["rows", "columns", "all"])
def test_elements_that_share_memory(lies):
    """As a gradient that autograd expanded from a sum."""
    left = {
        "rows": torch.randn(1, 6).expand(4, 6), "columns": torch.randn(4, 1).expand(4, 6),
        "all": torch.randn(1, 1).expand(4, 6),
    }[lies]  # fmt: skip
    right = torch.randn(6, 3)
    check(product(left, right), exact(left, right))
    check(product(right.T, left.T), exact(right.T, left.T))


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (2, 3, 0)], ids=str)
def test_empty_ones(shape):
    x, z, y = shape
    left, right, total = torch.randn(x, z), torch.randn(z, y), torch.randn(x, y)
    check(product(left, right), np.zeros((x, y)))
    kept = total.clone()
    add_product(total, left, right)
    assert torch.equal(total, kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_torchs(dtype):
    left, right = torch.randn(5, 6).to(dtype), torch.randn(6, 7).to(dtype)
    with mock.patch.object(matmul, "_onednn", side_effect=AssertionError):
        assert torch.equal(product(left, right), torch.mm(left, right))


@pytest.mark.parametrize(
    ("cpuinfo", "capability", "faster"),
    [(AMD, "AVX512", True), (INTEL, "AVX512", False), (AMD, "AVX2", False), ("", "AVX512", False)],
    ids=["amd", "intel", "without AVX-512", "unknown"],
)
def test_where_it_is_faster(cpuinfo, capability, faster, monkeypatch, tmp_path):
    monkeypatch.undo()
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(matmul, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert matmul.onednn_is_faster.__wrapped__() is faster
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not matmul.onednn_is_faster.__wrapped__()


LAYERS = """
import torch
from unittest import mock
from isoloss.parallel.ops import matmul
matmul.onednn_is_faster = lambda: True
from isoloss.models.mcore import build
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as linear
x, w, b = torch.randn(3, 2, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True), torch.randn(5)
grad = torch.randn(3, 2, 5)
with mock.patch.object(matmul, "_onednn", wraps=matmul._onednn) as taken:
    y = linear(x, w, b, False, False, False)
    forward = taken.call_count
    y.backward(grad)
torch.testing.assert_close(y, torch.nn.functional.linear(x, w, b))
torch.testing.assert_close(x.grad, grad @ w)
torch.testing.assert_close(w.grad, torch.einsum("sbu,sbd->ud", grad, x))
empty = linear(torch.zeros(0, 1, 8, requires_grad=True), w, None, False, False, False)
empty.sum().backward()
print(forward, taken.call_count, tuple(empty.shape), torch.matmul(x, w.T).requires_grad)
"""


def test_megatrons_layers_take_them():
    """In a process of its own: what they take is decided when the model's modules are imported."""
    found = subprocess.run([sys.executable, "-c", LAYERS], capture_output=True, text=True)
    assert found.stdout.splitlines()[-1:] == ["1 3 (0, 1, 5) True"], found.stderr
