"""A training checkpoint goes on in any other layout, for every family, under Transformer Engine's names."""

import pickle

import pytest
import torch
from worlds.checkpoints import load_and_train, train_and_save
from worlds.families import CONFIGS, SPARSE, VOCAB, write_folder
from worlds.transformers_parity import make_samples

from isoloss.models.checkpoint_keys import native_style, places
from isoloss.models.registry import read_architecture
from isoloss.models.weights import weight_map

LENGTHS = (2, 40, 17, 29, 33, 60)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_goes_on_in_another_layout(name, distributed_optimizer, tmp_path, pool):
    folder = write_folder(name, tmp_path / "model")
    samples = make_samples(LENGTHS, VOCAB)
    saved_in = {"tp": 2, "ep": 2 if name in SPARSE else 1, "distributed_optimizer": distributed_optimizer}
    checkpoint = tmp_path / "checkpoint"
    wanted = pool.run(2, train_and_save, folder, checkpoint, samples, saved_in)
    found = pool.run(2, load_and_train, folder, checkpoint, samples, {**saved_in, "tp": 1, "ep": 1, "pp": 2})

    wanted = {weight: tensor for rank in wanted for weight, tensor in rank.items()}
    found = {weight: tensor for rank in found for weight, tensor in rank.items()}
    assert found.keys() == wanted.keys()
    for weight, tensor in wanted.items():
        torch.testing.assert_close(found[weight], tensor, rtol=0, atol=2e-5, msg=lambda m, w=weight: f"{w}: {m}")

    arch = read_architecture(folder)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    keys = {key for key in metadata.state_dict_metadata if not key.startswith("optimizer") and "_extra_state" not in key}
    expected = {place.key for weight in weight_map(arch) for place in places(weight, arch, native_style(arch))}
    assert {key for key in keys if not key.startswith("chained")} == expected
