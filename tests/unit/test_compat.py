"""What releases of Megatron-Core are given, in the form of the newer ones as well as of the older."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from packaging.version import Version
from torch import nn
from torch.nn.functional import silu

import isoloss.models.mcore.build  # noqa: F401  it applies the patches
from isoloss.models.kinds.experts import Experts
from isoloss.models.mcore import transformer_engine
from isoloss.models.mcore.compat import AnyLayer, gradients_for_norm, submodules_of
from isoloss.models.mcore.layer_config import LayerConfig
from isoloss.models.mcore.layers.activations import ClampedSwiGLU, SwiGLU
from isoloss.models.mcore.layers.dense_mlp import RecomputingMLP
from isoloss.models.mcore.moe.router import Router

CONFIG = LayerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)


def test_submodules_of_what_is_yet_to_be_built():
    submodules = MLPSubmodules(linear_fc1=nn.Linear, linear_fc2=nn.Linear)
    for spec in (ModuleSpec(module=MLP, submodules=submodules), partial(MLP, submodules=submodules)):
        assert submodules_of(spec) is submodules


def test_activations_are_modules_that_add_nothing_to_a_checkpoint():
    wide = torch.linspace(-20, 20, 24, dtype=torch.float64).view(2, 12)
    gate, up = wide.chunk(2, dim=-1)
    clamped = gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
    for kind, expected in ((SwiGLU, silu(gate) * up), (ClampedSwiGLU, clamped)):
        module = build_module(kind, config=CONFIG)
        assert isinstance(module, nn.Module) and not module.state_dict() and callable(module.sharded_state_dict)
        torch.testing.assert_close(module(wide), expected)


def test_what_is_computed_again_fills_the_memory_of_the_first_time():
    """0.17 asks for a function that has both share their memory."""
    first = torch.arange(6.0)
    view = first.view(2, 3)[:, 1:]
    first.untyped_storage().resize_(0)
    random._get_share_storage()(first, torch.arange(6.0) + 10)
    assert first.tolist() == [10, 11, 12, 13, 14, 15] and view.tolist() == [[11, 12], [14, 15]]
    assert first._version == 0  # autograd lets nothing through whose version is another than it saved


@pytest.mark.parametrize("more", [{}, {"is_mtp_layer": False}])
def test_a_router_takes_what_either_release_gives_it(more):
    experts = Experts(count=4, top_k=2, intermediate_size=4, score="softmax", normalize=True)
    assert Router(config=CONFIG, pg_collection=None, experts=experts, **more).weight.shape == (4, 8)


def test_a_layer_is_built_like_a_spec_and_like_a_function():
    """0.16 and 0.17 read a spec; 0.19 calls it, with groups of its own choice among the arguments."""
    layer = AnyLayer(module=lambda **given: given, submodules="parts", params={"pg_collection": "ours"})
    assert (layer.submodules, layer.params) == ("parts", {"pg_collection": "ours"})
    built = layer(config=CONFIG, pg_collection="theirs", name=None)
    assert built == {"submodules": "parts", "config": CONFIG, "pg_collection": "ours", "name": None}


@pytest.mark.parametrize("name", ["get_main_grads_for_grad_norm", "get_grads_for_grad_norm"])
def test_gradients_of_a_norm_have_either_name(name):
    assert gradients_for_norm(SimpleNamespace(**{name: lambda: ["gradient"]})) == ["gradient"]


@pytest.mark.parametrize(("told", "version"), [(None, None), (Version("0.0.0"), None), (Version("2.9"),) * 2])
def test_where_there_is_no_transformer_engine_it_has_no_version(told, version, monkeypatch):
    """0.17 calls that version 0.0.0."""
    monkeypatch.setattr(transformer_engine, "get_te_version", lambda: told)
    assert transformer_engine.installed() == version


class _Biased(nn.Linear):
    """As Megatron builds and calls its own."""

    def __init__(self, inputs, outputs, **unused):
        super().__init__(inputs, outputs)

    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


def test_an_mlp_that_recomputes_its_activation_is_megatrons():
    """With biases, too: the same output and the same gradients, bit by bit. Megatron's alone holds the product of gate
    and up until the backward."""
    config = replace(CONFIG, gated_linear_unit=True, use_te_activation_func=True, ffn_hidden_size=12)
    parts = MLPSubmodules(linear_fc1=_Biased, linear_fc2=_Biased, activation_func=SwiGLU)
    expected, found = (kind(config, parts, ffn_hidden_size=12, tp_group=mock.Mock()) for kind in (MLP, RecomputingMLP))
    found.load_state_dict(expected.state_dict())
    outputs, gradients, freed = [], [], []
    for mlp in (expected, found):
        products = []
        mlp.activation_func.register_forward_hook(
            lambda module, inputs, product, products=products: products.append(product.untyped_storage())
        )
        x = torch.linspace(-1, 1, 40).view(5, 1, 8).requires_grad_()
        output, bias = mlp(x)
        freed.append(products[0].nbytes() == 0)
        (output + bias).square().sum().backward()
        outputs.append(output)
        gradients.append([x.grad, *(parameter.grad for parameter in mlp.parameters())])
    assert torch.equal(*outputs) and len(gradients[0]) == 5 and all(map(torch.equal, *gradients))
    assert freed == [False, True]
