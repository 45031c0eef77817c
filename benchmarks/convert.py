"""Conversion between Hugging Face and Megatron-Core: speed beside a plain copy of the same bytes, and memory.

    python benchmarks/convert.py [--out convert.json] [--layers 5] [--repeats 5] [--folder DIR] [--warm]

The model has the layers of an 8B Llama (hidden 4096, MLP 14336, 32 heads, 8 of them for keys and values) in bf16, in
several shards. The plain copy is shutil.copyfile and fsync of each file of the source; the conversion is everything
from reading the source's config.json to the rename of the finished target, in a process that has imported its modules.
The two take turns, in changing order, each with a target of its own on the same disk; before each, what is dirty is
written back, and the source is evicted from the page cache (with --warm it is left there). The least seconds of
--repeats count; the medians are told too.

Memory is anonymous memory (RssAnon: no files), summed over the process and any that it starts, sampled every few
milliseconds; its peak is told in multiples of the largest tensor, for the model and for one of half as many layers.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil
import torch
from safetensors.torch import save_file

from isoloss.models.conversion import hf_to_mcore, transfer
from isoloss.models.conversion.mcore_to_hf import plan_export
from isoloss.models.conversion.plan import FilePlan
from isoloss.models.families.registry import read_architecture
from isoloss.models.weights.weight_map import hf_shapes, weight_map

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "hidden_act": "silu",
    "dtype": "bfloat16",
}  # fmt: skip
SHARD_BYTES = 700_000_000
SPEED_CLAIM, MEMORY_CLAIM, FLAT_CLAIM = 0.8, 4.0, 1.1
DIRECTIONS: dict[str, Callable[[Path], FilePlan]] = {
    "hf-to-mcore": lambda source: hf_to_mcore.plan(source).transfer,
    "mcore-to-hf": lambda source: plan_export(source).plan,
}


@dataclass(frozen=True)
class Row:
    """One direction and model. Seconds: of each repetition. anonymous: peak bytes of the process tree."""

    direction: str
    layers: int
    nbytes: int
    largest: int
    plain: list[float]
    converted: list[float]
    anonymous: int

    @property
    def ratio(self) -> float:
        """Of the conversion's throughput to the plain copy's, best against best."""
        return min(self.plain) / min(self.converted)

    @property
    def median_ratio(self) -> float:
        return median(self.plain) / median(self.converted)

    @property
    def tensors(self) -> float:
        return self.anonymous / self.largest


def make_model(folder: Path, layers: int) -> int:
    """A Hugging Face folder of random bits; returns the bytes of its largest tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    shapes = hf_shapes(weight_map(read_architecture(folder)))
    shards: list[dict[str, torch.Size]] = [{}]
    nbytes = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if nbytes + size > SHARD_BYTES and shards[-1]:
            shards.append({})
            nbytes = 0
        shards[-1][name] = torch.Size(shape)
        nbytes += size
    file_of = {}
    for k, shard in enumerate(shards):
        file = f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            name: torch.empty(shape, dtype=torch.int16).random_().view(torch.bfloat16) for name, shape in shard.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return max(2 * torch.Size(shape).numel() for shape in shapes.values())


def plain_copy(source: Path, target: Path) -> float:
    started = time.perf_counter()
    target.mkdir()
    for path in sorted(source.rglob("*")):
        if path.is_file():
            copied = target / path.relative_to(source)
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copied)
            sync(copied)
    sync(target)
    return time.perf_counter() - started


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def converted(direction: str, source: Path, target: Path) -> tuple[float, int]:
    """Seconds, and the peak of anonymous memory."""
    command = [sys.executable, "-W", "ignore", __file__, "--child", direction, str(source), str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()  # it has imported everything
        peak, done = [0], threading.Event()
        sampler = threading.Thread(target=sample, args=(process.pid, peak, done))
        sampler.start()
        process.stdin.write("go\n")
        process.stdin.flush()
        seconds = float(process.stdout.readline())
        done.set()
        sampler.join()
    assert process.returncode == 0
    return seconds, peak[0]


def sample(pid: int, peak: list[int], done: threading.Event) -> None:
    tree = psutil.Process(pid)
    while not done.wait(0.004):
        total = anonymous(pid)
        for child in tree.children(recursive=True):
            # Between vfork and exec a new process is in the memory of its parent, and would count it again.
            if command_line(child.pid) != command_line(pid):
                total += anonymous(child.pid)
        peak[0] = max(peak[0], total)


def anonymous(pid: int) -> int:
    lines = of_process(pid, "status").splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(b"RssAnon:"))


def command_line(pid: int) -> bytes:
    return of_process(pid, "cmdline")


def of_process(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return b""


def child(direction: str, source: Path, target: Path) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    transfer.run(DIRECTIONS[direction](source), target)
    print(time.perf_counter() - started, flush=True)


def prepare(source: Path, warm: bool) -> None:
    os.sync()
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                if warm:
                    while file.read(1 << 24):
                        pass
                else:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, layers: int, repeats: int, warm: bool) -> Iterator[Row]:
    """Both directions of one model."""
    source, target = folder / "hf", folder / "target"
    largest = make_model(source, layers)
    for direction in DIRECTIONS:
        nbytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        plain, own, peaks = [], [], []
        for repeat in range(repeats):
            for turn in (0, 1):
                prepare(source, warm)
                if turn == repeat % 2:
                    plain.append(plain_copy(source, target))
                else:
                    seconds, peak = converted(direction, source, target)
                    own.append(seconds)
                    peaks.append(peak)
                shutil.rmtree(target)
        yield Row(direction, layers, nbytes, largest, plain, own, max(peaks))
        if direction == "hf-to-mcore":
            transfer.run(DIRECTIONS[direction](source), folder / "checkpoint")
            shutil.rmtree(source)
            source = folder / "checkpoint"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument("--layers", type=int, default=5, help="0.44 GB each, and 0.27 GB for the embedding")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure; takes three models")
    parser.add_argument("--warm", action="store_true", help="with the source in the page cache")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        direction, source, target = args.child
        return child(direction, Path(source), Path(target))
    cache = "warm" if args.warm else "cold"
    rows = []
    for layers in (args.layers, max(1, args.layers // 2)):
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=args.folder) as folder:
            rows += measure(Path(folder), layers, args.repeats, args.warm)
    print(f"{cache} cache, {os.cpu_count()} cores, best (median) of {args.repeats}")
    for row in rows:
        gigabytes = row.nbytes / 1e9
        print(
            f"{row.direction}, {row.layers} layers, {gigabytes:.2f} GB: "
            f"plain copy {gigabytes / min(row.plain):.2f} GB/s, conversion {gigabytes / min(row.converted):.2f} GB/s, "
            f"ratio {row.ratio:.2f} ({row.median_ratio:.2f}); anonymous memory {row.anonymous / 1e6:.0f} MB, "
            f"{row.tensors:.2f} x the largest tensor"
        )
    verdicts = {
        "speed": all(row.ratio >= SPEED_CLAIM for row in rows),
        "memory": all(row.tensors <= MEMORY_CLAIM for row in rows),
        "flat": all(row.anonymous <= FLAT_CLAIM * half.anonymous for row, half in zip(rows[:2], rows[2:])),
    }
    print(
        f"at least {SPEED_CLAIM} of a plain copy: {verdicts['speed']}; at most {MEMORY_CLAIM} x the largest tensor: "
        f"{verdicts['memory']}; no more than {FLAT_CLAIM} x that of half the model: {verdicts['flat']}"
    )
    versions = {name: version(name) for name in ("torch", "safetensors")} | {"python": platform.python_version()}
    described = [
        {**vars(row), "ratio": row.ratio, "median_ratio": row.median_ratio, "tensors": row.tensors} for row in rows
    ]
    if args.out:
        figures = {"versions": versions, "cache": cache, "rows": described, **verdicts}
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
