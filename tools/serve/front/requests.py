"""Requests in JSON, read strictly: a field that the server does not obey is refused by name.

Every class names the fields of a request of the SDK; one that may only have its default is not supported.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from isoloss.parallel.runtime.errors import UserError


class Refused(Exception):
    """A request that gets an HTTP status and one line."""

    def __init__(self, status: int, line: str):
        super().__init__(line)
        self.status, self.line = status, line


Whole = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# Of a checkpoint, which becomes a part of tinker://RUN/KIND/NAME.
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^/\x00-\x1f]+$")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    type: str | None = None


class Lora(Body):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def targets(self) -> list[str]:
        """Return the groups of `lora.targets` that the flags ask for. Raises UserError for none."""
        named = (("attention", self.train_attn), ("mlp", self.train_mlp), ("lm_head", self.train_unembed))
        targets = [name for name, asked in named if asked]
        if not targets:
            raise UserError("lora_config: set train_attn, train_mlp or train_unembed")
        return targets


class AdamConfig(Body):
    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: Whole
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: AdamConfig | None = None
    user_metadata: dict[str, Any] | None = None


class Adam(Body):
    learning_rate: Finite = 1e-4
    beta1: Finite = 0.9
    beta2: Finite = 0.95
    eps: Finite = 1e-12
    weight_decay: Finite = 0.0
    grad_clip_norm: Finite = 0.0


class OfModel(Body):
    """A request of a training client, which numbers it."""

    model_id: str
    seq_id: Whole


class OptimStep(OfModel):
    adam_params: Adam = Adam()
    optimizer_params: None = None


class SaveWeights(OfModel):
    path: Name
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(OfModel):
    path: Name | None = None
    sampling_session_seq_id: Whole | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    user_metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "SaveForSampler":
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give path or sampling_session_seq_id")
        return self

    @property
    def overwrite(self) -> bool:
        return True


class SaveExternal(OfModel):
    path: Name
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    age_encryption_recipients: list[str] | None = None
    overwrite: Literal[False] = False
    user_metadata: None = None


class LoadWeights(Body):
    """Asks for weights in a training client (model_id, seq_id), or in a new one (session_id, model_seq_id)."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: Whole | None = None
    session_id: str | None = None
    model_seq_id: Whole | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: AdamConfig | None = None
    weights_access_token: None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "LoadWeights":
        of_model, of_session = (self.model_id, self.seq_id), (self.session_id, self.model_seq_id)
        if (None in of_model) == (None in of_session):
            raise ValueError("give model_id and seq_id, or session_id and model_seq_id")
        return self


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: Whole
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class Prompt(Body):
    chunks: list[Chunk]


class SamplingParams(Body):
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    stop: str | int | list[str] | list[int] | None = None
    temperature: Annotated[Finite, Field(ge=0)] = 1.0
    top_k: int = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0


class Sample(Body):
    sampling_session_id: str
    seq_id: Whole
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    num_samples: Annotated[int, Field(ge=1)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Whole = 0
    topk_sample_logprobs: Whole = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    base_model: str | None = None
    model_path: str | None = None
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.prompt.chunks for token in chunk.tokens)


class OfSession(Body):
    session_id: str


class GetInfo(Body):
    model_id: str


class RetrieveFuture(Body):
    request_id: str
    model_id: str | None = None
    allow_metadata_only: bool | None = None


Request = TypeVar("Request", bound=BaseModel)


def read(kind: type[Request], body: bytes) -> Request:
    """Return the request of a body. Raises UserError with the field, its value and the fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise UserError(_line(error)) from None


def fields(body: bytes) -> dict[str, Any]:
    """Return the object of a body, whatever its fields. Raises UserError."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"the body is a {type(found).__name__}, not an object")
    return found


def _line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place, value, kind = ".".join(map(str, first["loc"])), repr(first["input"])[:80], first["type"]
    if kind == "json_invalid":
        return f"the body is no JSON: {first['msg']}"
    if kind == "missing":
        return f"{place} is missing"
    if kind in ("extra_forbidden", "none_required"):
        return f"{place}={value} is not supported by this server: leave it out"
    return f"{place}={value}: {first['msg']}" if place else first["msg"]
