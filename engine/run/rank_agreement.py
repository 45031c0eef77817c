"""All ranks must be given the same: configuration, model, tokenizer, rows, functions. Copies of files on the disks of
nodes go stale, and ranks that train on different ones would do so in silence."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from isoloss.engine.checkpoint.checkpoint import newest_first
from isoloss.engine.config.schema import Config
from isoloss.engine.run.folder import Fingerprint, run_folder, tokenizer_folder
from isoloss.engine.step.model_source import ModelSource
from isoloss.models.weights.side_files import sidecars
from isoloss.parallel import UserError
from isoloss.parallel.collectives import gather_objects
from isoloss.parallel.runtime import process_group

# Paths may differ from node to node: what is in the files is compared. Rank 0 alone chooses output_dir's number.
OF_A_NODE = ("data.train", "data.eval", "data.cache_dir", "model.path", "model.tokenizer", "train.profile")
WEIGHTS = (".safetensors", ".distcp")
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file of weights: to read all of it would take as long as to load it
ABSENT = "absent"


def check_ranks_agree(config: Config, run_name: str, source: ModelSource, given: Sequence[Fingerprint]) -> None:
    """Refuse a run whose ranks were given different things, naming what differs and the ranks.

    given: fingerprints of what the run reads besides the model and the configuration.
    Joins the world; one all-gather over it. Raises UserError on every rank.
    """
    process_group.init_process_group()
    everything = [*of_configuration(config), *of_model(config, source), *given, *of_checkpoints(config, run_name)]
    of_ranks = gather_objects([(each.of, each.value, each.decided_by) for each in everything])
    if refusal := difference([[Fingerprint(*each) for each in of_rank] for of_rank in of_ranks]):
        raise UserError(refusal)


def difference(of_ranks: Sequence[Sequence[Fingerprint]]) -> str | None:
    """A sentence about the first thing that is not the same on all ranks; None where all is."""
    known = [{each.of: each for each in of_rank} for of_rank in of_ranks]
    names = dict.fromkeys(name for of_rank in known for name in of_rank)
    differing = [name for name in names if len({_value(of_rank, name) for of_rank in known}) > 1]
    if not differing:
        return None
    first = differing[0]
    ranks_of: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(known):
        ranks_of.setdefault(_value(of_rank, first), []).append(rank)
    told = ", ".join(f"{value} on rank{'s' * (len(ranks) > 1)} {spans(ranks)}" for value, ranks in ranks_of.items())
    decided_by = next(of_rank[first].decided_by for of_rank in known if first in of_rank)
    more = f"; {len(differing) - 1} more differ, such as {differing[1]}" if differing[1:] else ""
    return f"the ranks were given different things: {first} is {told}: {decided_by} differs{more}; give all the same"


def spans(ranks: Sequence[int]) -> str:
    """Ascending numbers, such as "0-3, 6"."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends))


def of_configuration(config: Config) -> list[Fingerprint]:
    """Every key, but for paths that may differ between nodes."""
    return [
        Fingerprint(name, value if len(value := repr(each)) <= 60 else _digest(value.encode()), "this key")
        for name, each in _keys(config)
        if name not in OF_A_NODE
    ]


def of_model(config: Config, source: ModelSource) -> list[Fingerprint]:
    """The architecture, the tokenizer's files, and samples of the weights' files."""
    tokenizer = tokenizer_folder(config)
    files = {name: _digest((tokenizer / name).read_bytes()) for name in sidecars(tokenizer)}
    found = [
        Fingerprint("the architecture of model.path", _digest(repr(source.arch).encode()), "its config.json"),
        Fingerprint("the tokenizer", _digest(repr(files).encode()), "a file of its folder"),
    ]
    if config.model.from_scratch:
        return found
    weights = {path.name: sample(path) for path in sorted(source.path.iterdir()) if path.suffix in WEIGHTS}
    return [*found, Fingerprint("the weights of model.path", _digest(repr(weights).encode()), "a file of weights")]


def of_checkpoints(config: Config, run_name: str) -> list[Fingerprint]:
    """The names of those that a run may go on from, where it is to go on."""
    if not config.checkpoint.resume:
        return []
    names = [path.name for path in newest_first(run_folder(config, run_name) / "checkpoints")]
    told = ", ".join(names) or "empty"
    return [Fingerprint("the folder of checkpoints", told, "what is in output_dir, which all nodes must share,")]


def of_functions(functions: Mapping[str, str]) -> list[Fingerprint]:
    """The text of the user's functions, where they are files: FILE.py:NAME by key. One that is not there is left out:
    only rank 0 calls rewards."""
    paths = {key: name.rpartition(":")[0] for key, name in functions.items()}
    return [
        Fingerprint(f"the file of {key}", _digest(Path(path).read_bytes()), "its text")
        for key, path in paths.items()
        if path.endswith(".py") and Path(path).is_file()
    ]


def sample(path: Path) -> str:
    """A digest of a file's size and of pieces of it, from its beginning to its end."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for index in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _keys(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            yield from _keys(value, f"{prefix}{each.name}.")
        else:
            yield prefix + each.name, value


def _value(of_rank: Mapping[str, Fingerprint], name: str) -> str:
    return of_rank[name].value if name in of_rank else ABSENT


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
