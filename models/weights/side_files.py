"""The files of a model's folder other than weights: config.json, tokenizer, chat templates, generation defaults.

A run holds these files from its start: the folder may be on a scratch disk that is emptied, and a checkpoint without
them is no model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoloss.models.architecture import MTP_LAYERS, Architecture
from isoloss.models.weights.generation_config import stops_of
from isoloss.parallel.runtime.errors import UserError

CONFIG = "config.json"
# Missing ones are skipped.
SIDECARS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a folder of *.jinja
MAX_BYTES = 256 << 20  # of one of them; the largest tokenizer that is published has 35 MB


@dataclass(frozen=True)
class SideFiles:
    """The side files of a folder, in memory.

    folder: folder that they came from.
    files: their bytes by relative name, config.json not among them.
    config: the text of config.json.
    stops: tokens that end a completion, as the folder declares them.
    """

    folder: Path
    files: Mapping[str, bytes]
    config: str
    stops: tuple[int, ...]

    @classmethod
    def of(cls, folder: str | Path) -> "SideFiles":
        """Read a folder. Raises UserError where it has no config.json, or a file not to be copied (see `sidecars`)."""
        folder = Path(folder)
        text = read_config(folder)
        files = {name: (folder / name).read_bytes() for name in sidecars(folder)}
        return cls(folder, files, text, declared_stops(folder))

    def write(self, target: str | Path, arch: Architecture, stop_token_ids: Sequence[int] = ()) -> None:
        """Write config.json (see `as_written`) and all other files, so that `target` is a model of its own.

        stop_token_ids: tokens that end a completion, added to those that the folder declares.
        """
        target = Path(target)
        target.mkdir(parents=True, exist_ok=True)
        (target / CONFIG).write_text(as_written(self.config, arch), encoding="utf-8")
        for name, data in self.files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(data)
        if not set(stop_token_ids) <= set(self.stops):
            path = target / "generation_config.json"
            defaults = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            defaults["eos_token_id"] = [*self.stops, *sorted(set(stop_token_ids) - set(self.stops))]
            path.write_text(json.dumps(defaults, indent=2) + "\n", encoding="utf-8")


def declared_stops(folder: str | Path, largest: int | None = None) -> tuple[int, ...]:
    """`eos_token_id` of a model's folder as transformers reads it: of generation_config.json, or of config.json where
    there is none. largest: see `stops_of`, which says what is refused."""
    paths = [path for name in ("generation_config.json", CONFIG) if (path := Path(folder, name)).is_file()]
    return stops_of(paths[0], largest) if paths else ()


def sidecars(source: str | Path) -> tuple[str, ...]:
    """Return the relative names of a model's files other than weights and config.json.

    The files are copied into folders that are passed on: a link in a downloaded folder must not bring a private file
    along. Raises UserError for a link that leads out of the folder, and for what is no file or too large to be one.
    """
    source = Path(source)
    templates = source / TEMPLATES
    if templates.is_dir():
        _check_within(templates, source)
    found = [path for path in (*map(source.joinpath, SIDECARS), *sorted(templates.glob("*.jinja"))) if path.exists()]
    for path in found:
        _check_own(path, source)
    return tuple(path.relative_to(source).as_posix() for path in found)


def _check_own(path: Path, source: Path) -> None:
    """Raises UserError where `path` is outside of the folder, or no file of at most MAX_BYTES."""
    _check_within(path, source)
    if not path.is_file():
        raise UserError(f"{path} is no file: put the model's own there, or take it away")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UserError(f"{path} has {size:,} bytes, more than {MAX_BYTES:,}: copy the file of that name again")


def _check_within(path: Path, source: Path) -> None:
    """Raises UserError where `path` leads out of the folder, but for the cache of the Hugging Face hub that the folder
    belongs to: there every file is a link."""
    real, here = path.resolve(), source.resolve()
    within = [here]
    if here.parent.name == "snapshots":
        within.append(here.parent.parent / "blobs")
    if not any(real.is_relative_to(each) for each in within):
        raise UserError(
            f"{path} is a link to {real}, outside of the model's folder, and would be copied into every checkpoint: "
            "put the file itself there, or take the link away"
        )


def read_config(source: str | Path) -> str:
    """The text of config.json. Raises UserError where there is none, and as `sidecars`."""
    path = Path(source, CONFIG)
    if not path.is_file():
        raise UserError(f"{source} has no config.json to copy; give the Hugging Face folder that the model came from")
    _check_own(path, Path(source))
    return path.read_text(encoding="utf-8")


def as_written(published: str, arch: Architecture, *, whole: bool = False) -> str:
    """Return the text of config.json as published, but with `arch.dtype`, the type of the weights written, and with no
    layers for multi-token prediction. Where `arch` is the text model alone of a multimodal one (`text_only`), it is
    the text model's configuration.

    whole: all tensors of the folder are written, so layers for multi-token prediction stay.
    """
    config = json.loads(published)
    changed = dict(config)
    if "text_config" in config and arch.tensor_prefix == "model.":
        tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
        changed = {"architectures": [arch.text_class]} | tied | config["text_config"]
    if "text_config" in changed:
        changed["text_config"] = _of_written(changed["text_config"], arch, whole, new=not _dtype_keys(changed))
    changed = _of_written(changed, arch, whole, new="text_config" not in changed)
    return published if changed == config else json.dumps(changed, indent=2, ensure_ascii=False) + "\n"


def _of_written(config: Mapping[str, Any], arch: Architecture, whole: bool, *, new: bool) -> dict[str, Any]:
    """Return a model's configuration with the dtype written, and without layers that are not. new: set the dtype even
    where the configuration has none."""
    keys = _dtype_keys(config) or (["dtype"] if new else [])
    left_out = {} if whole else {name: 0 for name in MTP_LAYERS if config.get(name)}
    return {**config, **dict.fromkeys(keys, arch.dtype), **left_out}


def _dtype_keys(config: Mapping[str, Any]) -> list[str]:
    return [key for key in ("dtype", "torch_dtype") if key in config]
