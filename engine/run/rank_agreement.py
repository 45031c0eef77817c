"""Check that all ranks were given the same configuration, model, tokenizer, rows and functions.

Copies of files on the disks of nodes get stale, and ranks would train on different ones in silence.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from isoloss.engine.checkpoint.checkpoint import newest_first
from isoloss.engine.config.schema import Config
from isoloss.engine.run.folder import Fingerprint, run_folder, tokenizer_folder
from isoloss.engine.step.model_source import ModelSource
from isoloss.models.lora.peft_config import CONFIG
from isoloss.models.lora.peft_folder import TENSORS
from isoloss.models.weights.side_files import sidecars
from isoloss.parallel import UserError
from isoloss.parallel.collectives import gather_objects
from isoloss.parallel.runtime import process_group

# Paths, which may differ from node to node. The contents of files that are read are compared instead.
MAY_DIFFER = ("data.train", "data.eval", "data.cache_dir", "model.path", "model.tokenizer", "train.profile")
WEIGHTS = (".safetensors", ".distcp")
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file of weights, as reading all of it takes as long as loading it
ABSENT = "absent"


def check_ranks_agree(config: Config, run_name: str, source: ModelSource, given: Sequence[Fingerprint]) -> None:
    """Join the world, and raise UserError on every rank if inputs differ, naming them and the ranks. One all-gather.

    given: fingerprints of all inputs but the model and the configuration.
    """
    process_group.init_process_group()
    fingerprints = [
        *configuration_fingerprints(config),
        *model_fingerprints(config, source),
        *given,
        *checkpoint_fingerprints(config, run_name),
    ]
    if refusal := difference(gather_objects(fingerprints)):
        raise UserError(refusal)


def difference(by_rank: Sequence[Sequence[Fingerprint]]) -> str | None:
    """Return a sentence about the first input that differs between ranks; None if none does."""
    named = [{fingerprint.name: fingerprint for fingerprint in fingerprints} for fingerprints in by_rank]
    names = dict.fromkeys(name for fingerprints in named for name in fingerprints)
    differing = [name for name in names if len({_value(fingerprints, name) for fingerprints in named}) > 1]
    if not differing:
        return None
    first = differing[0]
    ranks_of: dict[str, list[int]] = {}
    for rank, fingerprints in enumerate(named):
        ranks_of.setdefault(_value(fingerprints, first), []).append(rank)
    values = ", ".join(f"{value} on rank{'s' * (len(ranks) > 1)} {spans(ranks)}" for value, ranks in ranks_of.items())
    decided_by = next(fingerprints[first].decided_by for fingerprints in named if first in fingerprints)
    more = f"; {len(differing) - 1} more differ, such as {differing[1]}" if differing[1:] else ""
    return f"the ranks were given different things: {first} is {values}: {decided_by} differs{more}; give all the same"


def spans(ranks: Sequence[int]) -> str:
    """Write ascending numbers as "0-3, 6"."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends))


def configuration_fingerprints(config: Config) -> list[Fingerprint]:
    """Return the values of all keys but paths that may differ between nodes."""
    return [
        Fingerprint(name, text if len(text := repr(value)) <= 60 else _digest(text.encode()), "this key")
        for name, value in _keys(config)
        if name not in MAY_DIFFER
    ]


def model_fingerprints(config: Config, source: ModelSource) -> list[Fingerprint]:
    """Return fingerprints of the architecture, of the tokenizer's files, and of samples of the files of weights, of the
    model and of the adapter that training begins with."""
    tokenizer = tokenizer_folder(config)
    files = {name: _digest((tokenizer / name).read_bytes()) for name in sidecars(tokenizer)}
    fingerprints = [
        Fingerprint("the architecture of model.path", _digest(repr(source.arch).encode()), "its config.json"),
        Fingerprint("the tokenizer", _digest(repr(files).encode()), "a file of its folder"),
    ]
    if config.lora.init is not None:
        folder = Path(config.lora.init)
        adapter = {path.name: sample(path) for path in (folder / CONFIG, folder / TENSORS)}
        fingerprints.append(Fingerprint("the adapter of lora.init", _digest(repr(adapter).encode()), "a file of it"))
    if config.model.from_scratch:
        return fingerprints
    weights = {path.name: sample(path) for path in sorted(source.path.iterdir()) if path.suffix in WEIGHTS}
    return [
        *fingerprints,
        Fingerprint("the weights of model.path", _digest(repr(weights).encode()), "a file of weights"),
    ]


def checkpoint_fingerprints(config: Config, run_name: str) -> list[Fingerprint]:
    """Return the names of the checkpoints that a resumed run may continue; nothing for a new run."""
    if not config.checkpoint.resume:
        return []
    names = [path.name for path in newest_first(run_folder(config, run_name) / "checkpoints")]
    text = ", ".join(names) or "empty"
    return [Fingerprint("the folder of checkpoints", text, "what is in output_dir, which all nodes must share,")]


def function_fingerprints(functions: Mapping[str, str]) -> list[Fingerprint]:
    """Return fingerprints of the files of the user's functions. functions: "FILE.py:NAME" and others, by key."""
    # A missing file is left out: only rank 0 calls rewards.
    paths = {key: name.rpartition(":")[0] for key, name in functions.items()}
    return [
        Fingerprint(f"the file of {key}", _digest(Path(path).read_bytes()), "its text")
        for key, path in paths.items()
        if path.endswith(".py") and Path(path).is_file()
    ]


def sample(path: Path) -> str:
    """Return a digest of a file's size and of SAMPLES pieces, from its beginning to its end."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for index in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _keys(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _keys(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _value(fingerprints: Mapping[str, Fingerprint], name: str) -> str:
    return fingerprints[name].value if name in fingerprints else ABSENT


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
