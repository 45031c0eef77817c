"""Write hashes.json: what mbridge makes of the tiny models' weights. README.md tells how to run it.

mbridge builds a Megatron-Core model of the TE spec and loads the Hugging Face folder into it. At TP 1 the model's own
parameters are hashed. At TP 2 it runs as rank 0 of a group that only exists in name, and the shards of both ranks are
hashed as mbridge hands them to its scatter.

Megatron-Core's TE spec wants Transformer Engine and a GPU; te_stub.py and three lines of `_hash` stand in for them.
Each (family, TP) runs in a process of its own: mbridge's Qwen bridges share one name table, which a tied model changes.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import te_stub
import tiny_models
import torch
from torch import distributed as dist

HASHES = Path(__file__).with_name("hashes.json")
VOCABULARY_MULTIPLE = 128
DISTRIBUTIONS = ("mbridge", "megatron-core", "torch", "transformers", "safetensors", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=3, metavar=("FAMILY", "TP", "FILE"), help="internal: one family at one TP")
    worker = parser.parse_args().worker
    if worker:
        family, tp_size, result = worker
        Path(result).write_text(json.dumps(_hash(family, int(tp_size))))
        return
    versions = {name: version(name) for name in DISTRIBUTIONS}
    whole, tp2 = ({family: _in_own_process(family, tp_size) for family in tiny_models.CONFIGS} for tp_size in (1, 2))
    assert all(whole[family].keys() == tp2[family].keys() for family in tiny_models.CONFIGS)
    text = json.dumps({"versions": versions, "families": whole, "tp2": tp2}, indent=1)
    text = re.sub(r"\[[^]]*\]", lambda array: json.dumps(json.loads(array[0])), text)  # arrays on one line
    HASHES.write_text(text + "\n")
    print(f"{HASHES}: " + ", ".join(f"{family} {len(entries)} weights" for family, entries in whole.items()))


def _in_own_process(family: str, tp_size: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        worker = [sys.executable, "-W", "ignore", __file__, "--worker", family, str(tp_size), str(result)]
        subprocess.run(worker, check=True, stdout=subprocess.DEVNULL)
        return json.loads(result.read_text())


def _hash(family: str, tp_size: int) -> dict:
    """{name: {"shape", "sha256"}} at TP 1, {name: [hash of each rank's shard]} above."""
    te_stub.install()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = object  # the token dispatcher makes one
    torch.nn.Module.cuda = lambda self, *_: self
    _init_groups(tp_size)
    from mbridge import AutoBridge

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        tiny_models.write(family, folder)
        bridge = AutoBridge.from_pretrained(
            folder, dtype=torch.float32, make_vocab_size_divisible_by=VOCABULARY_MULTIPLE
        )
        # Neither a device nor its random numbers: every parameter is loaded.
        bridge.set_extra_args(use_cpu_initialization=True, perform_initialization=False)
        shards = _record_shards(bridge)
        (model,) = bridge.get_model(folder, bf16=False)
    if tp_size > 1:
        return {name: [tiny_models.sha256(shard) for shard in of_ranks] for name, of_ranks in shards.items()}
    loaded = {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    assert not any(value.isnan().any() for value in loaded.values())
    return {name: {"shape": [*value.shape], "sha256": tiny_models.sha256(value)} for name, value in loaded.items()}


def _init_groups(tp_size: int) -> None:
    from megatron.core import parallel_state

    if tp_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp_size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_size, create_gloo_process_groups=False)


def _record_shards(bridge) -> dict[str, list[torch.Tensor]]:
    """{name: shards of all ranks}, filled while the bridge loads."""
    recorded, split = {}, bridge._weight_split_across_tp

    def split_and_record(name, whole, param, tp_size):
        shards = recorded[name] = list(split(name, whole, param, tp_size))
        assert len(shards) == tp_size and all(shard.shape == param.shape for shard in shards), name
        return shards

    bridge._weight_split_across_tp = split_and_record
    return recorded


if __name__ == "__main__":
    main()
