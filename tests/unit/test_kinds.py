"""What follows from the layers of a model, for every model of the tests: equal to what golden.json holds of it."""

import inspect
import re
from pathlib import Path

import pytest
from support.models.families import MODELS
from support.models.golden import NAMES, architecture, golden, record

from isoloss.models.kinds.kind import Attention
from isoloss.models.mcore.build import MODULES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/layer.md"


@pytest.mark.parametrize("name", NAMES)
def test_what_follows_from_an_architecture_is_as_recorded(name):
    # Lists, as JSON has them: a difference names the section, which `support.models.golden` prints.
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in record(name).items()} == golden()[
        name
    ]


def test_the_page_of_a_layer_has_each_kind_its_module_and_its_linear_layers():
    text, linears = PAGE.read_text(), {}
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \(`([\w/.]+)`\) \|", text, re.M)
    for name, cell in re.findall(r"^\| `([A-Z]\w+)` \| (`[a-z].+) \|$", text, re.M):
        linears[name] = linears.get(name, []) + re.findall(r"`([\w.]+)`", cell)
    archs = [architecture(name) for name in NAMES if name.startswith("tiny")]
    examples = {type(kind): kind for arch in archs for kind in arch.kinds}
    examples |= {type(kind): kind for arch in archs for kind in arch.kinds if len(kind.linears()) > 3}
    assert examples.keys() == MODULES.keys() and len(rows) == len(MODULES)
    for name, module_name, file in rows:
        (kind,) = (kind for kind in MODULES if kind.__name__ == name)
        module, slot = MODULES[kind], "self_attention." if issubclass(kind, Attention) else "mlp."
        assert (module.__name__, Path(inspect.getfile(module)).resolve()) == (module_name, ROOT / file)
        assert [slot + linear for linear in linears[name]] == list(examples[kind].linears())


@pytest.mark.parametrize("name", MODELS)
def test_linear_layers_have_the_matrices_of_the_weight_map(name):
    """All but routers, of which a token meets no more than a row, and gates of shared experts."""
    arch = architecture(f"tiny {name}")
    for number, layer in enumerate(arch.layers):
        weights = layer.weights(arch.place(number))
        matrices = {
            re.sub(r"local_experts\.\d+", "local_experts", weight.name.removesuffix(".weight"))
            for weight in weights
            if len(weight.shape) == 2 and "router" not in weight.name and "gate_weight" not in weight.name
        }
        linears = (*layer.attention.linears(), *layer.mlp.linears())
        assert matrices == {f"decoder.layers.{number}.{linear}" for linear in linears}
