"""The comparisons of tests/te/test_te_layouts.py with the real Transformer Engine, on CUDA devices.

Layers in fp32, where Transformer Engine's products run in TF32, against Megatron's local ones; kernels that exchange
tokens in bf16, which is all they take, against isoloss's own attention.
"""

import pytest
import torch
from support.models import te_models
from support.models.families import MODELS, VOCAB, write_folder
from support.models.transformers_parity import make_samples

from isoloss.models.mcore import transformer_engine

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
VERSION = transformer_engine.installed()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0 or VERSION is None, reason="needs a CUDA device and Transformer Engine"),
]
LENGTHS = (2, 40, 17, 29, 33, 60)
TF32 = 1e-2  # of a few products one after the other; a wrong name or order is of the size of 1
KERNELS = {"p2p": {"ring": 2}, "a2a": {"ulysses": 2}, "all_gather": {"ring": 2}, "a2a+p2p": {"ulysses": 2, "ring": 2}}


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-3))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_fused_layers_take_the_step_of_local_ones(name, tp, pool, tmp_path):
    if tp > GPUS:
        pytest.skip(f"needs {tp} devices")
    folder, samples = write_folder(name, tmp_path), make_samples(LENGTHS, VOCAB)
    local, fused = (pool.run(tp, te_models.evaluate, folder, samples, of, {"tp": tp}) for of in (False, True))
    for wanted, found in zip(local, fused):
        assert found.gradients.keys() == wanted.gradients.keys()
        assert distance(found.logits, wanted.logits) <= TF32
        assert all(distance(found.gradients[key], gradient) <= 3 * TF32 for key, gradient in wanted.gradients.items())


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_take_the_step_of_our_attention(kernel, pool, tmp_path):
    degrees = KERNELS[kernel]
    world = degrees.get("ulysses", 1) * degrees.get("ring", 1)
    if world > GPUS or VERSION is None or transformer_engine.SPLITS_PACKED_ROWS_SINCE[kernel] > VERSION:
        pytest.skip(f"needs {world} devices and a version whose {kernel} splits packed rows")
    folder, samples = write_folder("llama", tmp_path), make_samples(LENGTHS, VOCAB)
    (exact,) = pool.run(1, te_models.evaluate, folder, samples, False, {})
    (ours,) = pool.run(1, te_models.evaluate, folder, samples, False, {}, "bf16")
    for found in pool.run(world, te_models.evaluate, folder, samples, True, {**degrees, "cp_kernel": kernel}, "bf16"):
        assert distance(found.logits, exact.logits) <= 2 * distance(ours.logits, exact.logits)
        assert found.loss == pytest.approx(exact.loss, rel=2e-2)
