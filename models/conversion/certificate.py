"""`conversion.json`: what a conversion wrote and, once it was verified, the evidence.

`verified` is false until `--verify` has compared every tensor and the logits; only then it is a certificate.
"""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from isoloss.models.weights.checkpoint_names import Style
from isoloss.models.weights.manifest import FileRecord, files_to_json

NAME = "conversion.json"
VERSION = 1
PACKAGES = ("isoloss", "torch", "megatron-core", "transformers", "safetensors")


def text(
    *,
    direction: str,
    source: Path,
    family: str,
    key_style: Style,
    vocab_size: int,
    padded_vocab: int,
    num_tensors: Mapping[str, int],
    files: Mapping[str, FileRecord],
    evidence: Mapping[str, Any] | None = None,
) -> str:
    """direction: "hf-to-mcore" or "mcore-to-hf". files: what was written, besides this file.

    num_tensors: of the checkpoint's model, of the weight map, of the Hugging Face folder, and of what was left out.
    evidence: what `--verify` found; None before that.
    """
    fields: dict[str, Any] = {
        "format": VERSION,
        "direction": direction,
        "verified": evidence is not None,
        "versions": {name: version(name) for name in PACKAGES},
        "source": str(source.resolve()),
        "family": family,
        "key_style": key_style.value,
        "vocab_size": vocab_size,
        "padded_vocab": padded_vocab,
        "num_tensors": dict(num_tensors),
        "bytes": sum(record.bytes for record in files.values()),
        "files": files_to_json(files),
    }
    return json.dumps(fields | dict(evidence or {}), indent=2) + "\n"
