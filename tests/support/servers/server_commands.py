"""What starts a server of the tests: rollout.server_command."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
# The environment that `make test-sglang` makes.
SGLANG_PYTHON = TESTS.parent / ".sglang-venv/bin/python"
DOUBLE = f"{sys.executable} {TESTS}/doubles/sglang_server.py --model {{model}} --host {{host}} --port {{port}}"
# Attention and sampling in PyTorch, nothing compiled, no CUDA graphs, no overlap of batches: what runs on a CPU. The
# fraction is of the whole machine's memory, other programs' included, so the cache is bounded by its tokens instead.
SGLANG = (
    f"env PYTHONPATH={TESTS}/sglang/stand_ins SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= "
    f"TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 {SGLANG_PYTHON} -m sglang.launch_server "
    "--model-path {model} --host {host} --port {port} --device cpu --dtype float32 --skip-tokenizer-init "
    "--attention-backend torch_native --sampling-backend pytorch --grammar-backend none --disable-overlap-schedule "
    "--disable-cuda-graph --sleep-on-idle --skip-server-warmup --mem-fraction-static 0.9 --max-total-tokens 4096"
)
