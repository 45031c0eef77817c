"""Layers of pipeline stages: the split against all there are there are, and what it weighs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from support.models.decoders import decoder, sparse, with_windows

from isoloss.engine.batching.balance import CostModel
from isoloss.models.flops import layer_flops, output_flops
from isoloss.models.mcore.stages import pipeline_layout, split_layers, stage_layers
from isoloss.parallel import Layout

LLAMA_8B = decoder(32, 4096, (32, 8, 128), 14336, 128256)


def every_split(layers: int, stages: int):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(end - first for first, end in zip((0, *cuts), (*cuts, layers)))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.data(), st.integers(0, 12))
def test_no_split_is_better(costs, data, last):
    stages = data.draw(st.integers(1, len(costs)))

    def badness(split):
        ends = list(itertools.accumulate(split))
        of_stages = [sum(costs[end - count : end]) for count, end in zip(split, ends)]
        of_stages[-1] += last
        return max(of_stages), sum(cost**2 for cost in of_stages), split

    assert split_layers(costs, stages, last) == min(every_split(len(costs), stages), key=badness)


@pytest.mark.parametrize(
    ("pp", "vpp", "layers"),
    (
        (2, 1, (17, 15)),  # the output projection costs as much as 2.4 layers
        (4, 1, (8, 9, 9, 6)),  # the first stage holds the embedding: it is not the larger one
        (4, 2, (4, 4, 4, 4, 4, 5, 5, 2)),
        (1, 1, (32,)),
    ),
)
def test_the_last_stage_pays_for_the_output(pp, vpp, layers):
    assert stage_layers(LLAMA_8B, Layout(pp=pp, vpp=vpp)) == layers


def test_what_is_given_is_taken():
    assert stage_layers(LLAMA_8B, Layout(pp=2), (30, 2)) == (30, 2)


def test_layers_that_differ_are_weighed():
    small_vocabulary = decoder(8, 4096, (32, 8, 128), 14336, 128)
    assert stage_layers(small_vocabulary, Layout(pp=2)) == (4, 4)
    # Dense layers of a wide MLP before ones of which a token meets two narrow experts.
    some_sparse = sparse(small_vocabulary, 64, 2, 1024, "softmax", True, dense_layers=4)
    assert stage_layers(some_sparse, Layout(pp=2)) == (3, 5)
    windowed = with_windows(small_vocabulary, *(16,) * 4, *(None,) * 4)
    full, short = layer_flops(windowed, 4096)[-1], layer_flops(windowed, 4096)[0]
    assert layer_flops(windowed, 4096) == [short] * 4 + [full] * 4 and short < full


@pytest.mark.parametrize("tokens", (1, 10, 1000))
def test_layers_and_output_add_up_to_the_cost_of_a_sequence(tokens):
    archs = (
        LLAMA_8B,
        with_windows(LLAMA_8B, 16, None),
        sparse(LLAMA_8B, 64, 6, 1024, "softmax", True, shared_size=2048, dense_layers=3),
    )
    for arch in archs:
        total = sum(layer_flops(arch, tokens)) + output_flops(arch, tokens)
        assert total == pytest.approx(CostModel.of(arch).cost([tokens])[0], rel=1e-12)
    assert output_flops(LLAMA_8B.as_critic(), 7) == 2 * 7 * 4096


def test_megatron_reads_the_stages_in_the_order_of_the_model():
    layout = PipelineParallelLayerLayout(pipeline_layout((1, 3, 2, 2)), pipeline_model_parallel_size=2)
    layout.validate_layer_layout(num_layers=8, mtp_num_layers=None)
    held = [[[kind.name for kind in stage] for stage in rank] for rank in layout.layout]
    assert held == [
        [["embedding", "decoder"], ["decoder"] * 2],
        [["decoder"] * 3, ["decoder"] * 2 + ["loss"]],
    ]
