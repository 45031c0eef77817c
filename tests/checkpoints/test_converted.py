"""One converted checkpoint in every layout: its logits are those of the Hugging Face folder, bit for bit.

Two ways in: `model.path=CHECKPOINT`, which reads the files without Megatron-Core, and Megatron-Core's own
`dist_checkpointing.load` into the model of a layout.
"""

import pytest
import torch
from support.models.families import MODELS, SPARSE, VOCAB, write_folder
from support.models.transformers_parity import make_samples
from support.runs.checkpoints import logits, logits_after_plain_load

from isoloss.tools.convert import __main__ as convert

LENGTHS = (2, 40, 17, 29, 33, 60)
LAYOUTS = {"1": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2+pp2": {"tp": 2, "pp": 2}, "ep2": {"ep": 2}}


ROWS = [(name, layout) for name in MODELS for layout in LAYOUTS if name in SPARSE or layout != "ep2"]


@pytest.mark.parametrize(("name", "layout"), ROWS)
def test_a_converted_checkpoint_loads_in_every_layout(name, layout, tmp_path, pool):
    folder = write_folder(name, tmp_path / "in")
    checkpoint = tmp_path / "checkpoint"
    assert convert.main(["hf-to-mcore", "--hf", str(folder), "--out", str(checkpoint)]) == 0
    samples = make_samples(LENGTHS, VOCAB, seed=6)
    (reference,) = pool.run(1, logits, folder, samples, {})
    parallel, world = LAYOUTS[layout], {"1": 1, "tp2+pp2": 4}.get(layout, 2)
    straight = pool.run(world, logits, folder, samples, parallel)
    for of_rank in zip(
        straight,
        pool.run(world, logits, checkpoint, samples, parallel),
        pool.run(world, logits_after_plain_load, folder, checkpoint, samples, parallel),
        strict=True,
    ):
        assert torch.equal(of_rank[0], of_rank[1]) and torch.equal(of_rank[0], of_rank[2])
        torch.testing.assert_close(of_rank[0], reference, rtol=1e-4, atol=1e-4)
