"""Keys of `isoloss-serve`."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isoloss.engine.config.parse import defaults
from isoloss.engine.config.schema import Config
from isoloss.models.lora.config import LoraConfig
from isoloss.parallel.runtime.config_key import Keys, key, require

# Keys of a run that the server obeys; `serve.*` are its own. Clients decide the rest.
OBEYED = (
    "model",
    "parallel",
    "memory",
    "kernels",
    "moe",
    "batch.max_tokens",
    "train.precision",
    "train.seed",
    "train.deterministic",
    "output_dir",
    "serve",
)


@dataclass(frozen=True)
class ServeKeys(Keys, group="serve"):
    """The server of the Tinker API (docs/serve.md)."""

    name: str = key(
        "",
        "Name by which clients ask for the model, such as Qwen/Qwen3-8B; recipes choose tokenizer and template by it. "
        "Empty: the name of the folder model.path.",
    )
    host: str = key("127.0.0.1", "Address that the server listens at.")
    port: int = key(8000, "Port that the server listens at.", at_least=1)
    ranks: int | None = key(None, "Ranks of this machine; null: as many as the layout has.", at_least=1)
    api_keys: str | None = key(
        None,
        "File with an API key in each line, which begins with tml-; clients of different keys do not see each other. "
        "null: a key is made and written to output_dir/api_key.",
    )
    save_every: int = key(
        20,
        "Optimizer steps of a training client after which its state is saved; a restart repeats later ones.",
        at_least=1,
    )
    max_lora_rank: int = key(256, "Largest rank of adapters that a client may ask for.", at_least=1)
    max_models: int = key(64, "Training clients that may exist at a time.", at_least=1)
    max_versions: int = key(
        64, "Versions of weights to sample from that stay in host memory; older ones wait in output_dir.", at_least=1
    )
    session_seconds: int = key(
        3600,
        "Seconds without a heartbeat after which a client's session is over: its training clients are forgotten, its "
        "checkpoints stay.",
        at_least=60,
    )
    max_queued: int = key(20_000, "Requests that may wait at a time.", at_least=1)
    max_body_bytes: int = key(64 << 20, "Bytes of the body of a request.", at_least=1)
    max_decompressed_bytes: int = key(1 << 30, "Bytes of the body of a request, decompressed.", at_least=1)
    max_datums: int = key(1024, "Samples of a request; clients divide a call into such parts.", at_least=1)
    max_samples: int = key(1024, "Completions of a request.", at_least=1)
    max_tokens: int = key(1 << 20, "Tokens of a sample.", at_least=1)
    chunk_bytes: int = key(5_000_000, "Bytes of such a part.", at_least=1)
    sglang_servers: tuple[str, ...] = key(
        (),
        "Addresses of SGLang servers of the same model, started with --enable-lora, which sample instead of the ranks; "
        "they read adapters from output_dir.",
    )
    sglang_timeout: float = key(600.0, "Seconds that a completion of an SGLang server may take.", above=0.0)
    concurrency: int = key(256, "Completions that are decoded together.", at_least=1)


@dataclass(frozen=True)
class ServeConfig(Config):
    """The configuration of the server: of a run the keys in OBEYED. Raises UserError where another one is given."""

    serve: ServeKeys = field(default_factory=ServeKeys)

    def __post_init__(self):
        super().__post_init__()
        plain = defaults(type(self))
        for name, value in _flat(dataclasses.asdict(self)):
            if not any(name == obeyed or name.startswith(f"{obeyed}.") for obeyed in OBEYED):
                default = dict(_flat(plain)).get(name)
                hint = "is a key of runs that isoloss-serve does not read: its clients decide; leave it out"
                require(_plain(value) == default, name, value, hint)

    def of_engine(self) -> Config:
        """Return the configuration of the engine whose frozen model all clients share."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(Config)}
        return Config(**{**values, "lora": LoraConfig(rank=1)})

    @property
    def folder(self) -> Path:
        """Return the folder of keys, journal and checkpoints."""
        return Path(self.output_dir or "runs/serve")

    @property
    def name(self) -> str:
        """Return the name by which clients ask for the model."""
        return self.serve.name or self.model.path.rstrip("/").rsplit("/", 1)[-1]


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [(f"{prefix}{name}", value)]
    return flat


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
