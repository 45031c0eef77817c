"""The numbers that a run of the recipe leaves are those of a plain loop over torch and transformers, written out here:
losses, norms, learning rates, counts, throughput, evaluations, and the exported weights."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs.optimizer_steps import adamw, fp64_model, mean_loss, step, tokenized
from support.runs.runs import conversation, rows_of
from support.runs.training import train_at
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from isoloss.engine.config.schema import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from isoloss.engine.run import run
from isoloss.recipes import launch

OPTIM = OptimConfig(betas=(0.8, 0.97), eps=1e-4, weight_decay=0.2, clip=0.1)
RATES = (2.5e-3, 5e-3, 5e-3, 3e-3)  # two steps of warm-up to 5e-3, then half a cosine to 1e-3 in two
OVERRIDES = ("optim.lr=5e-3", "optim.min_lr=1e-3", "optim.warmup_steps=2", "optim.betas=[0.8,0.97]", "optim.eps=1e-4",
             "optim.weight_decay=0.2", "optim.clip=0.1")  # fmt: skip
PEAK = 1e9  # FLOPs a second that the device is said to have


# Uneven lengths: no mean over batches or rows is the mean over tokens.
EVAL = [conversation("Count.", " and ".join(str(k) for k in range(n))) for n in (1, 2, 3, 20, 1, 12, 1)]


@dataclass(frozen=True)
class Plain:
    """What the plain loop found. evaluations: after 0, 2 and 4 steps."""

    train: list
    eval: list
    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(inputs, tmp_path_factory) -> Path:
    """A folder of transformers with random weights."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(inputs / "model", initializer_range=0.3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(folder)
    (folder.parent / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVAL))
    return folder


@pytest.fixture(scope="module")
def plain(inputs, model) -> Plain:
    """Four steps, each on all rows, so that their order says nothing."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in (inputs / "rows.jsonl").read_text().splitlines()]
    train, held_out = ([tokenized(row, tokenizer) for row in each] for each in (rows, EVAL))
    losses, norms, evaluations = [], [], []
    with fp64_model(model) as net:
        optimizer = adamw(net, OPTIM)
        for number, rate in enumerate(RATES):
            if number % 2 == 0:
                evaluations.append(mean_loss(net, held_out).item())
            loss = mean_loss(net, train)
            norms.append(step(net, optimizer, loss, rate, OPTIM.clip))
            losses.append(loss.item())
        evaluations.append(mean_loss(net, held_out).item())
        weights = {name: p.detach() for name, p in net.named_parameters()}
    return Plain(train, held_out, losses, norms, evaluations, weights)


def flops_by_hand(length: int) -> int:
    """Of a training step on a sequence: 4 layers of width 32 with 4 heads of 8, 2 key/value heads, an MLP of 48 and a
    vocabulary of 2048; half of the attention square."""
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    forward = 2 * (4 * layer + 2048 * 32) * length + 4 * 2 * 4 * 8 * length**2
    return 3 * forward


@pytest.mark.parametrize(("precision", "tolerance"), (("fp64", 1e-9), ("fp32", 1e-5)))
def test_a_run_is_that_of_a_plain_loop(precision, tolerance, inputs, model, plain, arguments, monkeypatch, capsys):
    monkeypatch.setattr(run, "peak_flops", lambda device: PEAK)
    more = [f"model.path={model}", "model.from_scratch=false", f"data.eval={model.parent}/eval.jsonl"]
    more += ["batch.global_size=12", "batch.max_tokens=64", "train.steps=4", "train.eval_every=2", *OVERRIDES]
    assert launch.main("sft", [*arguments, *more, f"train.precision={precision}"]) == 0
    told = capsys.readouterr().out.splitlines()

    steps = rows_of("out/metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert min(plain.norms) > 2 * OPTIM.clip
    for key, wanted in (("loss", plain.losses), ("grad_norm", plain.norms), ("lr", RATES)):
        assert [row[key] for row in steps] == pytest.approx(wanted, rel=tolerance), key
    lengths = [len(row.tokens_T) for row in plain.train]
    for row in steps:
        assert row["valid_tokens"] == sum(int(each.mask_T.sum()) for each in plain.train)
        assert row["total_tokens"] == sum(lengths)
        assert (row["sequences"], row["applied"]) == (12, 1)
        assert row["micro_batches"] >= math.ceil(sum(lengths) / 64)
        assert row["tokens_per_second"] == pytest.approx(sum(lengths) / row["seconds"], rel=1e-12)
        flops = sum(map(flops_by_hand, lengths))
        assert row["mfu"] == pytest.approx(flops / (row["seconds"] * PEAK), rel=1e-12)

    evaluations = rows_of("out/eval.jsonl")
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert [row["loss"] for row in evaluations] == pytest.approx(plain.evaluations, rel=tolerance)
    targets = sum(int(row.mask_T.sum()) for row in plain.eval)
    assert {(row["valid_tokens"], row["sequences"]) for row in evaluations} == {(targets, 7)}

    # Of a model that knows how often each token was a target, each counted once more than it was.
    counts = torch.ones(2048, dtype=torch.float64)
    for row in plain.train:
        counts += torch.bincount(row.tokens_T[row.mask_T], minlength=2048)
    unigram = -(counts / counts.sum()).log()[torch.cat([row.tokens_T[row.mask_T] for row in plain.eval])].mean().item()
    first, last = plain.evaluations[0], plain.evaluations[-1]
    assert told[-2] == (
        f"eval loss {last:.3f} nats/token (before training {first:.3f}); unigram baseline {unigram:.3f}; worse "
        f"than a unigram model by {last - unigram:.3f}"
    )
    exported = load_file("out/hf/model.safetensors")
    for name, weight in plain.weights.items():
        torch.testing.assert_close(exported[name].double(), weight, rtol=0, atol=1e-6, msg=name)


def test_mfu_is_of_all_ranks(pool, inputs, plain, tmp_path):
    config = Config(
        ModelConfig(f"{inputs}/model", from_scratch=True),
        data=DataConfig((f"{inputs}/rows.jsonl",), max_length=128),
        batch=BatchConfig(12),
        train=TrainConfig(1),
        checkpoint=CheckpointConfig(export_hf=False),
        output_dir=f"{tmp_path}/out",
    )
    pool.run(2, train_at, config, PEAK)
    (row,) = rows_of(f"{tmp_path}/out/metrics.jsonl")
    flops = sum(flops_by_hand(len(each.tokens_T)) for each in plain.train)
    assert row["mfu"] == pytest.approx(flops / (row["seconds"] * 2 * PEAK), rel=1e-12)


def test_more_steps_stretch_the_schedule(arguments):
    """A run that goes on with a larger train.steps takes the learning rates of the longer run from there on."""
    argv = [*arguments, "optim.lr=8e-3", "optim.warmup_steps=0", "optim.schedule=linear"]
    assert launch.main("sft", argv) == 0
    assert launch.main("sft", [*argv, "train.steps=4", "checkpoint.resume=true"]) == 0
    # Of two steps: 8, 4; of four: 8, 6, 4, 2.
    rates = [row["lr"] for row in rows_of("out/metrics.jsonl")]
    assert rates == pytest.approx([8e-3, 4e-3, 4e-3, 2e-3], rel=1e-12)


def test_weight_decay_of_a_resumed_run_is_the_configured_one(model, arguments):
    """Two runs go on from one checkpoint, with another decay each: they end apart by lr x decay x weight."""
    argv = [*arguments, f"model.path={model}", "model.from_scratch=false", "optim.lr=1e-2", "optim.schedule=constant"]
    assert launch.main("sft", argv) == 0
    start = load_file("out/hf/model.safetensors")
    ends = []
    for decay in (0.0, 0.5):
        shutil.copytree("out", f"out{decay}")
        more = ["checkpoint.resume=true", "train.steps=3", f"optim.weight_decay={decay}", f"output_dir=out{decay}"]
        assert launch.main("sft", [*argv, *more]) == 0
        ends.append(load_file(f"out{decay}/hf/model.safetensors"))
    for name, weight in start.items():
        lost = 1e-2 * 0.5 * weight if weight.ndim > 1 else torch.zeros_like(weight)
        torch.testing.assert_close(ends[0][name] - ends[1][name], lost, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp64"))
def test_the_export_has_the_type_of_config_json(dtype, precision, model, arguments, tmp_path):
    """At learning rate 0 its numbers are the ones that the run began with, rounded to that type."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    described = json.loads((folder / "config.json").read_text())
    described.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps({**described, "dtype": dtype}))
    more = [f"model.path={folder}", "model.from_scratch=false", "optim.lr=0", "train.steps=1"]
    assert launch.main("sft", [*arguments, *more, f"train.precision={precision}"]) == 0
    wanted, trained = getattr(torch, dtype), torch.bfloat16 if precision == "bf16" else torch.float32
    exported, start = load_file("out/hf/model.safetensors"), load_file(folder / "model.safetensors")
    assert exported.keys() == start.keys() and len(start) > 40
    for name, weight in start.items():
        assert exported[name].dtype == wanted, name
        assert torch.equal(exported[name], weight.to(trained).to(wanted)), name
    described = json.loads(Path("out/hf/config.json").read_text())
    assert {described.get("dtype"), described.get("torch_dtype")} - {None} == {dtype}
