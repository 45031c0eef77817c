"""A version of an engine's weights stays what it was while training goes on, which it does not disturb: all in bits."""

import pytest
from support.models.families import VOCAB, write_folder
from support.models.transformers_parity import make_samples
from support.ranks import versions


@pytest.mark.parametrize("rank", [0, 3], ids=["full weights", "adapter"])
@pytest.mark.parametrize("parallel", [{"tp": 2}, {}], ids=["tp2", "dp2"])
def test_a_version_stays_and_training_is_not_disturbed(rank, parallel, tmp_path, pool):
    pool.run(2, versions.check, write_folder("llama", tmp_path), make_samples((20, 9, 31, 5), VOCAB), rank, parallel)
