"""`conversion.json`: what a conversion wrote and, once it was verified, the evidence.

`verified` is false until `--verify` has compared every tensor and the logits; only then it is a certificate.
"""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from isoloss.models.weights.checkpoint_read import CheckpointWeights
from isoloss.models.weights.manifest import FileRecord, files_to_json
from isoloss.models.weights.weight_map import hf_shapes, weight_map

NAME = "conversion.json"
VERSION = 1
PACKAGES = ("isoloss", "torch", "megatron-core", "transformers", "safetensors")


def text(
    files: Mapping[str, FileRecord], *, direction: str, source: Path, weights: CheckpointWeights, left_out: int
) -> str:
    """Return the record of a conversion that nobody has verified yet, as JSON.

    files: records of the files written, except for this one.
    direction: "hf-to-mcore" or "mcore-to-hf".
    weights: weights of the checkpoint.
    left_out: number of tensors of the source that the model has no use for.
    """
    mapped = weight_map(weights.arch)
    fields: dict[str, Any] = {
        "format": VERSION,
        "direction": direction,
        "verified": False,
        "versions": {name: version(name) for name in PACKAGES},
        "source": str(source.resolve()),
        "family": weights.arch.family,
        "key_style": weights.style.value,
        "vocab_size": weights.arch.vocab_size,
        "padded_vocab": weights.padded_vocab,
        "num_tensors": {
            "checkpoint": len(weights.keys),
            "weights": len(mapped),
            "hugging_face": len(hf_shapes(mapped)),
            "left_out": left_out,
        },
        "bytes": sum(record.bytes for record in files.values()),
        "files": files_to_json(files),
    }
    return json.dumps(fields, indent=2) + "\n"
