"""Layouts as text, in a world, and for a model: every refusal names the key and the value. No process group."""

import pytest
from support.models.decoders import decoder, sparse, with_mlp
from support.ranks.layouts import ON_GPUS, overrides

from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config, ModelConfig
from isoloss.models.kinds.dense import Dense
from isoloss.parallel import Layout, UserError
from isoloss.recipes.launch import compose_config
from isoloss.tools.prove.proof import on_layout

DENSE = decoder(6, 48, (8, 4, 6), 72, 100)
CONFIG = Config(ModelConfig("anywhere"))
SPARSE = sparse(DENSE, 6, 2, 28, "softmax", True, shared_size=36)


@pytest.mark.parametrize(
    "text", ["1", "tp2", "tp2+nosp", "tp4+nosp", "pp2+vpp3", "tp2+pp2+ulysses2+ep2+etp2+dp2", "ep4+dp4"]
)
def test_a_layout_is_written_as_it_is_read(text):
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize("text", [*ON_GPUS, "tp2+ring3+ep2", "tp2+pp2+etp2+dp3"])
def test_the_keys_of_a_layout_give_that_layout(text):
    """None is dropped on the way: tests on GPUs would run a smaller layout under the name of this one."""
    layout = Layout.parse(text)
    config, *_ = compose_config("sft", Config, overrides(layout))
    assert config.parallel.layout().with_world(layout.world_size) == layout
    for proof in (CONFIG, config):
        assert on_layout(proof, layout, "fp64").parallel.layout().with_world(layout.world_size) == layout


@pytest.mark.parametrize("text", ["tp2", "tp2+nosp", "tp4", "pp3", "pp3+vpp2", "ulysses8", "tp2+ulysses4", "tp8+nosp"])
def test_dense_models_admit(text):
    rules.check(CONFIG, DENSE, Layout.parse(text))


@pytest.mark.parametrize("text", ["tp2", "ep2", "ep6", "tp2+etp2", "tp2+ep3+etp2", "pp2+ep2", "ulysses2+ep2"])
def test_models_with_experts_admit(text):
    rules.check(CONFIG, SPARSE, Layout.parse(text))


REFUSED = [
    (DENSE, "tp3", "parallel.tp=3 does not divide the model's 8 attention heads"),
    (decoder(6, 48, (24, 8, 6), 96, 100), "tp3", "neither divides nor is a multiple of"),
    (with_mlp(DENSE, Dense(73)), "tp2", "parallel.tp=2 does not divide the model's intermediate_size 73"),
    (DENSE, "tp2+ulysses8", "parallel.ulysses=8 does not divide the 4 attention heads of a TP rank"),
    (DENSE, "pp4+vpp2", "parallel.pp=4 x vpp=2 makes more stages than the model's 6 layers"),
    (DENSE, "ep2", "parallel.ep=2 is for mixture-of-experts models and this one is dense; set it to 1"),
    (DENSE, "tp2+etp2", "parallel.etp=2 is for mixture-of-experts models"),
    (SPARSE, "tp2+nosp", "parallel.sequence_parallel=false does not work with experts and parallel.tp > 1"),
    (SPARSE, "ep4", r"parallel.ep=4 does not divide the model's 6 experts; use one of \[1, 2, 3, 6\]"),
    (SPARSE, "tp8+etp8", "parallel.etp=8 does not divide the model's expert width 28"),
    (SPARSE, "tp8", "parallel.tp=8 does not divide the model's shared expert's width 36"),
    (
        sparse(DENSE, 6, 2, 28, "softmax", True, bias=True),
        "tp2+etp2",
        "parallel.etp=2 does not work with biases in the experts",
    ),
]


@pytest.mark.parametrize(("arch", "text", "message"), REFUSED, ids=[text for _, text, _ in REFUSED])
def test_what_a_model_does_not_admit_is_refused_by_name(arch, text, message):
    with pytest.raises(UserError, match=message) as refusal:
        rules.check(CONFIG, arch, Layout.parse(text))
    assert "\n" not in str(refusal.value)


def test_what_a_world_does_not_admit_is_refused_by_name():
    assert Layout.parse("tp2+ep4").with_world(8).dp == 4
    with pytest.raises(UserError, match=r"world size 6 is not a multiple of tp 4 x pp 1 .* = 4"):
        Layout.parse("tp4").with_world(6)
    with pytest.raises(UserError, match=r"parallel.ep=3 x etp=1 does not divide the 4 ranks of a pipeline stage"):
        Layout.parse("tp2+ep3").with_world(4)
