"""Hugging Face model folders: reading tensors one at a time, writing them as a stream of shards.

Nothing here holds a whole model: a reader maps the files and returns the tensor that is asked for, a writer keeps at
most one shard in memory.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.weight import Part, Weight
from isoloss.models.weights.finite import check_finite
from isoloss.models.weights.manifest import IS_A_POINTER, is_pointer, read_json
from isoloss.models.weights.mmap import DTYPES, safetensors_views
from isoloss.models.weights.weight_map import embedding_name, hf_shapes, output_name, weight_map
from isoloss.parallel.runtime.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000
PARTIAL = ".partial"
# How the names of tensors end that go with quantized ones.
_SCALES = (".qweight", ".qzeros", ".scales", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_proj_blocks")
QUANTIZED = "the weights are quantized; take the unquantized model, or let transformers write a bfloat16 copy first"
# Of a converted checkpoint: which tensor was in which file, for the way back to make every file what it was.
SHARDS = "shards.json"


class WeightSource(Protocol):
    """A source of weights: a Hugging Face folder, a checkpoint, or made-up weights."""

    def whole(self, weight: Weight) -> Tensor:
        """Return a weight before tensor parallelism, on the CPU."""
        ...


class HFReader:
    """Tensors of the safetensors file(s) in a folder, read one at a time, on the CPU, in the type of the file.

    Raises UserError where the folder has no safetensors, a shard of the index is missing, or a file is damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._open: dict[str, safe_open] = {}
        self._views: dict[str, Tensor] = {}
        # Where both exist, transformers reads the single file; so do we.
        indexed = (self.folder / INDEX).is_file() and not (self.folder / SINGLE).is_file()
        self.file_of: Mapping[str, str] = self._from_index() if indexed else self._from_single()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the type in safetensors' spelling, such as "BF16"."""
        return self._handle(name).get_slice(name).get_dtype()

    def get(self, part: Part) -> Tensor:
        if part.row is None:
            return self._handle(part.tensor).get_tensor(part.tensor)
        return self._handle(part.tensor).get_slice(part.tensor)[part.row]

    def view(self, part: Part) -> Tensor:
        """Return the tensor of `get` as a view of the mapped file, without reading it. For types in `mapped.DTYPES`."""
        if part.tensor not in self._views:
            self._views |= safetensors_views(self.folder / self.file_of[part.tensor])
        whole = self._views[part.tensor]
        return whole if part.row is None else whole[part.row]

    def whole(self, weight: Weight) -> Tensor:
        parts = [self.get(part) for part in weight.parts]
        for part, numbers in zip(weight.parts, parts):
            check_finite(numbers, part.tensor, self.folder / self.file_of[part.tensor])
        return weight.mapping.merge(parts)

    def _handle(self, name: str) -> safe_open:
        if name not in self.file_of:
            raise UserError(f"{self.folder} has no tensor {name}; its weights do not belong to its config.json")
        file = self.file_of[name]
        handle = self.opened(file)
        if name not in set(handle.keys()):
            raise UserError(f"{self.folder / file} lacks {name}, which {INDEX} places there; copy the folder again")
        return handle

    def opened(self, file: str) -> safe_open:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                if isinstance(error, SafetensorError) and is_pointer(self.folder / file):
                    raise UserError(f"{self.folder / file} {IS_A_POINTER}") from None
                raise UserError(
                    f"{self.folder / file} is not a safetensors file, or cut short ({error}); copy or download it again"
                ) from None
        return self._open[file]

    def _from_index(self) -> dict[str, str]:
        path = self.folder / INDEX
        fields = read_json(path, "copy it again")
        try:
            file_of = dict(fields["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a safetensors index ({error!r}); copy it again") from None
        if outside := [file for file in file_of.values() if not is_file_name(file)]:
            raise UserError(f"{path} names {outside[0]!r}, which is no file of its folder; get the model anew")
        files = set(file_of.values())
        missing = sorted(file for file in files if not (self.folder / file).is_file())
        if missing:
            raise UserError(
                f"{self.folder} lacks {missing[0]} ({len(missing)} of the {len(files)} files that {INDEX} "
                "names are missing); finish the download"
            )
        return file_of

    def _from_single(self) -> dict[str, str]:
        if not (self.folder / SINGLE).is_file():
            raise UserError(f"{self.folder} has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights")
        return dict.fromkeys(self.opened(SINGLE).keys(), SINGLE)


def is_file_name(name: object) -> bool:
    """Return whether `name` names a file in a folder, and nothing outside of the folder. (The file may be a link: in
    the cache of the Hugging Face hub all are.)"""
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name


def tensor_names(folder: Path) -> Set[str]:
    """Return the names of the tensors in a Hugging Face folder, or in the one that a converted checkpoint came from;
    none where there are no weights. Raises UserError where a file is damaged."""
    if (folder / SHARDS).is_file():
        files = read_json(folder / SHARDS, "copy or convert the checkpoint again")["files"]
        return {name for file in files.values() for name in file["tensors"]}
    return {*HFReader(folder).names} if has_weights(folder) else frozenset()


def has_weights(folder: Path) -> bool:
    """Return whether a Hugging Face folder has safetensors, and not config.json and a tokenizer alone."""
    return any((folder / name).is_file() for name in (INDEX, SINGLE))


def check(source: HFReader, arch: Architecture) -> None:
    """Check that `source` holds every tensor of the model at its shape, as numbers of a type that is trained, and
    nothing whose absence would change the model.

    Reads headers only, except for a second copy of tied embeddings, which is compared.
    Raises UserError naming the first tensor that is missing, of another type or shape, or left over.
    """
    wanted = hf_shapes(weight_map(arch))
    present = set(source.names)
    for name, shape in wanted.items():
        if name not in present:
            raise UserError(
                f"the model's weights lack {name} of shape {list(shape)}, which its config.json calls for; "
                + (QUANTIZED if any(each.endswith(_SCALES) for each in present) else "the two do not belong together")
            )
        if (kind := source.dtype(name)) not in DTYPES:
            raise UserError(
                f"{name} in {source.folder / source.file_of[name]} has the type {kind}; only {', '.join(DTYPES)} are "
                f"read: {QUANTIZED}"
            )
        if source.shape(name) != shape:
            raise UserError(
                f"{name} has shape {list(source.shape(name))} where config.json calls for {list(shape)}; "
                "the weights and config.json do not belong together"
            )
    left_over = sorted(name for name in present - set(wanted) if not harmless(name, source, arch))
    if left_over:
        raise UserError(
            f"{left_over[0]} is a tensor that this architecture does not have ({len(left_over)} such); the "
            "weights belong to another model than config.json describes"
        )


@dataclass(frozen=True)
class Entry:
    """The place of a written tensor: a file of the folder that `finish` will rename, and the tensor's size."""

    file: str
    nbytes: int


def write_shards(
    folder: str | Path, tag: str, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, Entry]:
    """Write Hugging Face-named tensors under temporary names; returns where each one went, for `finish`.

    tag: distinguishes the writers of one folder (one a pipeline stage, say); they may run at the same time.
    A shard holds at most max_shard_bytes, or one tensor. Tensors are kept as they are until their shard is full, so the
    caller must not overwrite one that it has yielded. A tensor yielded twice is a bug of the caller (ValueError).
    Raises UserError where the folder already holds a model.
    """
    folder = Path(folder)
    _refuse_model(folder)
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Entry] = {}
    for k, shard in enumerate(_fill_shards(tensors, max_shard_bytes)):
        file = f"{tag}-{k:05d}.safetensors{PARTIAL}"
        twice = entries.keys() & shard.keys()
        if twice:
            raise ValueError(f"{min(twice)} was written twice by {tag}")
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
        save_file(on_cpu, folder / file, metadata={"format": "pt"})  # transformers 4 refuses a file without the format
        entries |= {name: Entry(file, tensor.nbytes) for name, tensor in shard.items()}
    return entries


def finish(folder: str | Path, entries: Sequence[Mapping[str, Entry]]) -> None:
    """Give the shards of all writers their final names and write the index; call it once, after every writer.

    Order of the files: by writer, then as written. One file in all is model.safetensors, without an index. The index
    comes last, so a folder whose export was cut short does not pass for a model.
    """
    folder = Path(folder)
    _refuse_model(folder)
    where: dict[str, Entry] = {}
    for of_writer in entries:
        twice = where.keys() & of_writer.keys()
        if twice:
            raise ValueError(f"{min(twice)} was written by two writers")
        where |= of_writer
    files = list(dict.fromkeys(entry.file for entry in where.values()))
    final = dict(zip(files, shard_names(len(files))))
    for file in files:
        (folder / file).rename(folder / final[file])
    for stale in folder.glob(f"*.safetensors{PARTIAL}"):  # of an export that was cut short
        stale.unlink()
    if len(files) > 1:
        partial = folder / (INDEX + PARTIAL)
        partial.write_text(index_text({n: Entry(final[e.file], e.nbytes) for n, e in where.items()}), encoding="utf-8")
        partial.rename(folder / INDEX)


def shard_names(count: int) -> list[str]:
    return [SINGLE] if count == 1 else [f"model-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]


def index_text(entries: Mapping[str, Entry]) -> str:
    """The text of model.safetensors.index.json."""
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries.values())},
        "weight_map": {name: entry.file for name, entry in sorted(entries.items())},
    }
    return json.dumps(index, indent=2) + "\n"


def _fill_shards(tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    nbytes = 0
    for name, tensor in tensors:
        if shard and nbytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, nbytes = {}, 0
        if name in shard:
            raise ValueError(f"{name} was written twice")
        shard[name] = tensor
        nbytes += tensor.nbytes
    if shard:
        yield shard


def harmless(name: str, source: HFReader, arch: Architecture) -> bool:
    """Return whether a tensor that is no weight of the model may be left out: a buffer of old exports, a layer for
    multi-token prediction, or the copy of a tied output projection. Raises UserError where that is not a copy."""
    if name == output_name(arch) and arch.tie_embeddings:
        # transformers leaves the two untied where a file holds different ones, whatever config.json says.
        shape, embedding = source.shape(name), embedding_name(arch)
        if shape != source.shape(embedding) or not torch.equal(
            source.get(Part(name, shape)), source.get(Part(embedding, shape))
        ):
            raise UserError(
                f"config.json: tie_word_embeddings=True contradicts the weights: {name} differs from "
                f"{embedding}; set it to false in config.json, or delete {name}"
            )
        return True
    beyond = range(arch.num_layers, arch.num_layers + arch.mtp_layers)
    left_out = (*arch.left_out, *(f"{arch.tensor_prefix}layers.{k}." for k in beyond))
    return name.endswith("rotary_emb.inv_freq") or name.startswith(left_out)


def _refuse_model(folder: Path) -> None:
    present = [p.name for p in folder.glob("model*.safetensors")] + [p.name for p in folder.glob(INDEX)]
    if present:
        raise UserError(f"{folder} already holds {min(present)}; choose an empty folder to write the model to")
