"""What the kernels of flash-linear-attention are asked: a stand-in with their arguments (fla-core 0.6.0), in fp64."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models.gated_delta import architecture, build, load, random_case
from torch import Tensor

from isoloss.parallel import Layout, Mesh
from isoloss.parallel.attention import PackedRow
from isoloss.parallel.ops import flash_linear_attention, gated_delta, short_convolution
from isoloss.parallel.ops.flash_linear_attention import CONVOLUTION, RULE

LENGTHS = (70, 2, 133)


def causal_conv1d(
    x, weight: Any = None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None,
    backend="triton", cu_seqlens: Any = None, cu_seqlens_cpu: Any = None, chunk_indices=None, cp_context=None,
):  # fmt: skip
    assert activation == "silu" and len(x) == 1
    assert bias is residual is initial_state is chunk_indices is cp_context is None and not output_final_state
    return short_convolution.short_convolution(x[0], weight, lengths_of(cu_seqlens, cu_seqlens_cpu))[None], None


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
    cu_seqlens: Any = None, cu_seqlens_cpu: Any = None, chunk_indices=None, cp_context=None,
):  # fmt: skip
    assert scale is None and use_qk_l2norm_in_kernel and g.dtype == beta.dtype == torch.float32
    assert not (use_beta_sigmoid_in_kernel or allow_neg_eigval or state_v_first)
    assert chunk_indices is cp_context is None and all(len(t) == 1 for t in (q, k, v, g, beta))
    lengths = lengths_of(cu_seqlens, cu_seqlens_cpu)
    assert initial_state is None or len(initial_state) == len(lengths)
    inputs = gated_delta.DeltaInputs(q[0], k[0], v[0], g[0], beta[0])
    out, left = gated_delta.delta_rule_and_states(inputs, lengths, None, initial_state)
    return out[None], left if output_final_state else None


def lengths_of(on_device: Tensor, on_host: Tensor) -> tuple[int, ...]:
    assert on_device.dtype == on_host.dtype == torch.int64 and on_device.equal(on_host)
    return tuple(on_host.diff().tolist())


@pytest.fixture
def kernels(monkeypatch):
    """The package, and no GPU that it would ask for."""
    monkeypatch.setitem(sys.modules, CONVOLUTION, SimpleNamespace(causal_conv1d=causal_conv1d))
    monkeypatch.setitem(sys.modules, RULE, SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule))
    taken = []
    monkeypatch.setattr(flash_linear_attention, "takes", lambda x: taken.append(x) or True)
    return taken


@pytest.mark.parametrize("parents", [(), (-1, 0, 0)], ids=["documents", "branches"])
@pytest.mark.parametrize("switched_on", [True, False])
def test_the_layer_is_the_same_with_the_kernels(one_rank, kernels, switched_on, parents):
    """Output and gradients; also where two documents go on from the first."""
    arch, mesh = architecture(), Mesh.create(Layout())
    case, found = random_case(LENGTHS, arch, 0), []
    for fast in (switched_on, False):
        layer, row = build(arch, mesh), PackedRow(lengths=LENGTHS, parents=parents)
        load(layer, case, mesh)
        layer.with_kernels = fast
        out = layer(case.hidden[:, None], None, packed_seq_params=row)[0][:, 0]
        (out * case.grad).sum().backward()
        found.append([out, *(each.grad for each in layer.parameters())])
    assert len(kernels) == switched_on
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()  # the kernels' decays and rates are fp32


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """installed(packages, Triton's version, GPU's capability): a process that has them and has not looked yet."""
    monkeypatch.syspath_prepend(tmp_path)

    def of(packages: tuple[str, ...], triton: str, capability: int) -> None:
        for name in packages:
            (tmp_path / f"{name}.py").touch()
        importlib.invalidate_caches()
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
        flash_linear_attention.why_not.cache_clear()

    yield of
    flash_linear_attention.why_not.cache_clear()


def on(is_cuda: bool, dtype: torch.dtype) -> bool:
    return flash_linear_attention.takes(SimpleNamespace(is_cuda=is_cuda, dtype=dtype))  # pyright: ignore


def test_only_16_bits_on_a_gpu_with_the_package(installed):
    installed((), "3.7.1", 9)
    assert not on(True, torch.bfloat16)
    installed(("fla",), "3.7.1", 9)
    assert on(True, torch.bfloat16) and on(True, torch.float16)
    assert not on(True, torch.float32) and not on(True, torch.float64) and not on(False, torch.bfloat16)


@pytest.mark.parametrize(
    ("packages", "triton", "capability", "runs"),
    [
        (("fla",), "3.3.1", 9, True),
        (("fla",), "3.4.0", 9, False),
        (("fla",), "3.6.0", 9, False),
        (("fla",), "3.7.1", 9, True),
        (("fla",), "3.6.0", 10, True),
        (("fla", "tilelang"), "3.6.0", 9, True),
    ],
)
def test_not_with_the_triton_that_fla_refuses_on_hopper(installed, packages, triton, capability, runs):
    """chunk_bwd_dqkwg of fla-core 0.6.0 raises there, in the first backward."""
    installed(packages, triton, capability)
    assert on(True, torch.bfloat16) == runs
    assert runs or triton in (flash_linear_attention.why_not() or "")
