"""Every rank writes and reads its own part of a checkpoint, of a format that Megatron's own code writes by a gather."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint_shares
from support.models.families import VOCAB, write_folder
from support.models.published import QWEN3_8B
from support.models.transformers_parity import make_samples
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from isoloss.models.weights.manifest import read as read_manifest

LENGTHS = (2, 40, 17, 29, 33, 60)
LARGER = {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 2, "head_dim": 128}


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint as torch alone reads it, without the rows that pad a vocabulary."""
    file = checkpoint.with_suffix(".whole")
    dcp_to_torch_save(str(checkpoint), str(file))
    found = {key: value for key, value in torch.load(file).items() if isinstance(value, Tensor)}
    padded = ("word_embeddings.weight", "output_layer.weight")
    return {key: value[:VOCAB] if key.endswith(padded) else value for key, value in found.items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and len(found) > 40
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


def test_every_rank_writes_reads_and_holds_its_own_part(tmp_path, pool):
    """At tp2 dp4. A load reads a share of the checksums, this rank's part of the optimizer, and its weights."""
    model = write_folder("qwen3", tmp_path / "model", **LARGER)
    folder = tmp_path / "checkpoint"
    costs = pool.run(8, checkpoint_shares.save_and_load, model, folder, make_samples(LENGTHS, VOCAB), {"tp": 2})
    files = {name: record.bytes for name, record in read_manifest(folder).files.items() if name.endswith(".distcp")}
    written = [sum(size for name, size in files.items() if name.startswith(f"__{rank}_")) for rank in range(8)]
    whole = sum(written)
    metadata = (folder / ".metadata").stat().st_size
    assert whole > 80e6
    for rank, own in enumerate(written):
        assert own == pytest.approx(whole / 8, rel=0.05), rank
        host, read = costs[rank].host, costs[rank].read
        assert host[0] < 1.05 * own, rank
        assert read[0] < 0.05 * own, rank  # no file again for its checksum
        optimizer = own - costs[rank].weights / 4
        assert read[1] < 1.05 * (own + optimizer + costs[rank].weights) + 4 * metadata, rank
        assert host[1] < 0.5 * own, rank  # from the files to their place, tensor by tensor


@pytest.mark.slow
def test_of_8_billion_parameters_each_of_eight_ranks_writes_an_eighth(tmp_path):
    """At tp2 dp4, by dry runs. In bf16 a parameter has 14 bytes: its own two, and fp32 weight and moments. Norms, which
    every TP rank holds, are written once."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    command = [sys.executable, "-m", "checkpoints.checkpoint_plan", str(tmp_path), "8", "parallel.tp=2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "train.precision=bf16"], cwd=Path(__file__).parents[1], env=environment, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    ranks = json.loads(done.stdout.splitlines()[-1])
    written = [own for own, _ in ranks]
    assert sum(written) == pytest.approx(8_190_735_360 * 14, rel=1e-6)
    assert all(own == pytest.approx(sum(written) / 8, rel=0.002) for own in written)
    assert all(own < held for own, held in ranks)  # of the weights a share


SAVED = {"qwen3": {"tp": 2}, "qwen3-moe": {"ep": 2}, "deepseek-v3": {"pp": 2}}  # on four ranks


@pytest.mark.parametrize("name", SAVED)
def test_the_files_are_those_of_a_gather_in_other_pieces(name, tmp_path, pool):
    """The same tensors to the bit; and each side reads the other's files."""
    layers = 4 if name == "deepseek-v3" else 3  # ranks meet within a weight
    model = write_folder(name, tmp_path / "model", num_hidden_layers=layers, intermediate_size=112)
    ours, theirs, samples = tmp_path / "ours", tmp_path / "theirs", make_samples(LENGTHS, VOCAB)
    done = pool.run(4, checkpoint_shares.exchange, model, ours, theirs, samples, SAVED[name])
    assert done == [(True, True)] * 4
    assert_same(tensors(ours), tensors(theirs))
    pieces = [len(read_pieces(folder, "optimizer.state.exp_avg.")) for folder in (ours, theirs)]
    assert pieces[0] > pieces[1]


def read_pieces(folder: Path, prefix: str) -> list[object]:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    return [index for index in metadata.storage_data if index.fqn.startswith(prefix)]


LAYOUTS = (({"tp": 2}, 8), ({"pp": 2, "vpp": 2}, 4), ({"ep": 2}, 8), ({}, 1), ({"tp": 2, "pp": 2, "ep": 2}, 8))


@pytest.mark.slow
def test_a_checkpoint_goes_through_every_layout_unchanged(tmp_path, pool):
    """Saved in one layout, loaded and saved in the next, and so on: no bit of weights and optimizer changes."""
    model = write_folder("qwen3-moe", tmp_path / "model", num_hidden_layers=4)
    saved, samples, wanted = tmp_path / "none", make_samples(LENGTHS, VOCAB), {}
    for at, (parallel, world) in enumerate(LAYOUTS):
        before, saved = saved, tmp_path / f"step_{at}"
        pool.run(world, checkpoint_shares.train_or_load, model, before, saved, parallel, None if at else samples)
        found = tensors(saved)
        if at:
            assert_same(found, wanted)
        wanted = found
