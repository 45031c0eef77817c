"""The stop tokens that a file of a model's folder names, as transformers and servers read them, or one line."""

from pathlib import Path

from isoloss.models.weights.manifest import read_json
from isoloss.parallel.runtime.errors import UserError


def stops_of(path: Path, largest: int | None = None) -> tuple[int, ...]:
    """Return the tokens of `eos_token_id` of generation_config.json or config.json, perhaps none.

    largest: largest of the model's token ids; None: unknown.
    Raises UserError where the file is not JSON, or names something that is no token.
    """
    said = read_json(path, "copy it again from the model's source, or delete it")
    inner = said.get("text_config")  # of a multimodal model, in config.json
    declared = said.get("eos_token_id")
    if declared is None and isinstance(inner, dict):
        declared = inner.get("eos_token_id")
    tokens = declared if isinstance(declared, list) else [] if declared is None else [declared]
    for token in tokens:
        if type(token) is not int or token < 0 or (largest is not None and token > largest):
            raise UserError(
                f"{path}: eos_token_id={_shown(declared)} must be a token id or a list of token ids, and "
                f"{_shown(token)} is none" + ("" if largest is None else f" of 0 to {largest}") + "; correct it"
            )
    return tuple(tokens)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
