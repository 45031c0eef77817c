"""The same claims on real devices over NCCL: run with `pytest tests/gpu` on a machine with GPUs.

On one GPU the token budgets are compared; on several every layout of their number joins in.
"""

import dataclasses
import inspect
import json
import math
import subprocess
import sys
from importlib.resources import files

import pytest
import torch
from support.models.families import MODELS, VOCAB, write_folder
from support.models.transformers_parity import make_samples
from support.ranks import attention as attention_world
from support.ranks import invariance as world
from support.ranks.layouts import ON_GPUS, overrides
from support.runs.checkpoints import logits
from transformers import AutoModelForCausalLM

from isoloss.engine.config.schema import Config
from isoloss.parallel import Layout, Mesh
from isoloss.parallel.attention import PackedRow, grid_attention
from isoloss.parallel.loss_head import unrounded_logits
from isoloss.parallel.ops.block_attention import Heads
from isoloss.recipes.launch import compose_config
from isoloss.tools.prove import proof
from isoloss.tools.prove.bugs import NO_BUG, PLANTED_BUGS
from isoloss.tools.prove.parity import Case, freeze

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")]
SORT = files("isoloss.recipes") / "assets" / "sort"
LAYOUTS = [layout for layout in ON_GPUS if Layout.parse(layout).world_size <= GPUS]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    cache = tmp_path_factory.mktemp("gpu")
    return compose_config("sft", Config, ["batch.global_size=16", f"data.cache_dir={cache}"])[0]


@pytest.fixture(scope="module")
def samples(config):
    return proof.first_batch(config, NO_BUG)


def test_logits_of_bf16_weights_are_not_rounded():
    """A product whose output is rounded to bf16 is off by about 1e-3."""
    hidden, weight = (torch.randn(size, 512, device="cuda").bfloat16() for size in (64, 4001))
    wanted = hidden.double() @ weight.double().T
    assert float((unrounded_logits(hidden, weight) - wanted).norm() / wanted.norm()) <= 1e-5


@pytest.mark.parametrize("precision", ("fp64", "fp32"))
def test_every_layout_agrees(config, samples, precision):
    cases = [
        Case(budget, proof.loss_config(mode, config))
        for mode in ("token-mean", "seq-mean-token-mean")
        for budget in (600, 0)
    ]
    rows = proof.prove(config, samples, {Layout.parse(layout): cases for layout in LAYOUTS}, precision)
    assert all(row.against.passed for row in rows), [row.against.reason for row in rows]


@pytest.mark.parametrize("value_width", (64, 40))
@pytest.mark.parametrize("window", (None, 100))
@pytest.mark.parametrize("ring", (1, 2, 4))
def test_one_call_for_all_documents_is_dense_attention(ring, window, value_width):
    """FlashAttention over what ring ranks have in common, forward and backward, to bf16 rounding."""
    random = torch.Generator().manual_seed(2)
    widths = ((8, 64), (2, 64), (2, value_width), (8, value_width))
    whole = [torch.randn(1024, *shape, generator=random).bfloat16() for shape in widths]
    lengths = (1, 37, 600, 90, 5, 291)
    found = attention_world.round_the_ring(attention_world.Case(*(t.cuda() for t in whole), lengths, window), ring)
    for one, other in zip(
        found,
        attention_world.dense_reference(attention_world.Case(*(t.double() for t in whole), lengths, window)),
        strict=True,
    ):
        assert torch.linalg.vector_norm(one.cpu().double() - other) <= 1e-2 * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_a_whole_row_with_a_window_and_sinks_is_dense_attention(one_rank, dtype):
    """Through the layers' own entry: by FlashAttention in bf16, by blocks of queries in fp32 and fp64."""
    random = torch.Generator().manual_seed(3)
    q, k, v, grad = (torch.randn(1024, heads, 64, generator=random).to(dtype) for heads in (8, 2, 2, 8))
    lengths, sinks = (1, 37, 600, 90, 5, 291), torch.randn(8, generator=random).to(dtype)
    case = attention_world.Case(*(t.double() for t in (q, k, v, grad)), lengths, 100, sinks.double())
    inputs = [t.cuda().requires_grad_() for t in (q, k, v, sinks)]
    mesh = Mesh.create(Layout())
    heads = Heads(attention_world.SCALE, 100, inputs[3])
    out = grid_attention(*inputs[:3], PackedRow(lengths=lengths), mesh.ulysses, mesh.ring, heads)
    (grad.cuda() * out).sum().backward()
    error = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for one, other in zip([out, *(t.grad for t in inputs)], attention_world.dense_reference(case), strict=True):
        assert torch.linalg.vector_norm(one.cpu().double() - other) <= error * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("bug", ("mean-of-micro-batch-means", "dropped-micro-batch"))
def test_planted_bugs_show(config, bug):
    samples = proof.first_batch(config, PLANTED_BUGS[bug])
    cases = [Case(budget, proof.loss_config("token-mean", config)) for budget in (600, 0)]
    rows = proof.prove(config, samples, {Layout(): cases}, "fp64", PLANTED_BUGS[bug])
    assert [row.against.passed for row in rows] == [False, True]


def test_bf16_trains_like_fp32(pool, config, samples):
    runs = {}
    for precision in ("fp32", "bf16"):
        train = dataclasses.replace(config.train, precision=precision)
        optim = dataclasses.replace(config.optim, warmup_steps=0, lr=1e-3)
        runs[precision] = pool.run(
            1, world.losses, dataclasses.replace(config, train=train, optim=optim), freeze(samples), 20
        )[0]
    assert all(math.isfinite(loss) for loss in runs["bf16"])
    assert runs["bf16"][0] == pytest.approx(runs["fp32"][0], rel=2e-3)
    assert runs["bf16"][-1] == pytest.approx(runs["fp32"][-1], rel=2e-2)
    assert runs["bf16"][-1] < 0.9 * runs["bf16"][0]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_on_a_cpu(name, pool, tmp_path, monkeypatch):
    folder = write_folder(name, tmp_path / "in")
    samples = make_samples((40, 17, 110), VOCAB)
    (found,) = pool.run(1, logits, folder, samples, {})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    of_model = sys.modules[type(model).__module__]
    for function in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):  # not what packages have for a GPU alone
        if hasattr(of_model, function):
            monkeypatch.setattr(of_model, function, inspect.unwrap(getattr(of_model, function)))
    for sample, of_sample in zip(samples, found.split([len(sample) for sample in samples])):
        with torch.no_grad():
            wanted = model(input_ids=sample.tokens_T[None], use_cache=False).logits[0, :-1].double()
        wanted *= sample.mask_T[1:, None]
        assert (of_sample[1:] - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollouts_of_a_run_have_the_trainers_logprobs(layout, tmp_path):
    """The grpo recipe, in process on the device, over NCCL: two generated batches, the weights synced between them."""
    out = tmp_path / "run"
    ranks = Layout.parse(layout)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks.world_size}"]
    command += ["-m", "isoloss.recipes.grpo", "preset=tiny", f"model.path={SORT}", "model.from_scratch=true"]
    command += ["data.eval=[]", "train.steps=4", f"output_dir={out}", *overrides(ranks)]
    subprocess.run(command, check=True)
    assert json.loads((out / "run.json").read_text())["layout"] == str(ranks)  # not a smaller one
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and all(row["applied"] for row in rows)
    assert max(row["train_rollout_logprob_diff"] for row in rows) <= 1e-4
    versions = [json.loads(line)["weight_versions"] for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert {tuple(each) for each in versions} == {(0,), (2,)}
