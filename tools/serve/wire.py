"""Bytes of the Tinker API <-> nouns of the server. Messages are of our own table; a test compares it with the SDK's.

Shape suffixes: T tokens of one datum, N its targets, K targets of a position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from isoloss.parallel.runtime.errors import UserError
from isoloss.tools.serve.messages import message

FLOAT32, INT64 = 1, 2
DTYPES = {FLOAT32: np.dtype(np.float32), INT64: np.dtype(np.int64)}
STOP = {"stop": 0, "length": 1}
SUFFIXES = ("mean", "sum", "min", "max", "slack", "hash2", "unique")
CHUNK = 1 << 20  # bytes that are decompressed at a time


class BadRequest(UserError):
    """Raised for a body that cannot be obeyed, with one line for the client."""


@dataclass(frozen=True)
class Datum:
    """Tokens that the model reads, int64 [T], and the named tensors of a loss, [N] or [N, K] with N = T: float32, or
    int64 for `target_tokens`."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ForwardBackward:
    """A request for a loss and its gradient, or the loss alone (forward_only). seq_id: its number, from 1."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True)
class Limits:
    """Limits of a body: its bytes as sent and decompressed, its datums, and tokens of one of them."""

    body_bytes: int
    decompressed_bytes: int
    datums: int
    tokens: int


@dataclass(frozen=True)
class Sampled:
    """A completion: int32 tokens, float32 log-probabilities, and "stop" or "length"."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: str


def decompressed(body: bytes, encoding: str | None, limits: Limits) -> bytes:
    """Return a body without its Content-Encoding. Raises BadRequest for a long one, before it is in memory."""
    if len(body) > limits.body_bytes:
        raise BadRequest(f"the body is longer than {limits.body_bytes} bytes (serve.max_body_bytes)")
    if encoding in (None, "", "identity"):
        return body
    if encoding != "zstd":
        raise BadRequest(f"Content-Encoding {encoding!r} is not supported; send zstd, or none")
    parts, size = [], 0
    try:
        for part in zstandard.ZstdDecompressor().read_to_iter(body, write_size=CHUNK):
            size += len(part)
            if size > limits.decompressed_bytes:
                raise BadRequest(
                    f"the body is longer than {limits.decompressed_bytes} bytes (serve.max_decompressed_bytes)"
                )
            parts.append(part)
    except zstandard.ZstdError as error:
        raise BadRequest(f"the body is no zstd: {error}") from None
    return b"".join(parts)


def read_forward_backward(body: bytes, encoding: str | None, limits: Limits) -> ForwardBackward:
    """Read a ForwardBackwardRequest. Raises BadRequest."""
    sent = message("ForwardBackwardRequest")()
    try:
        sent.ParseFromString(decompressed(body, encoding, limits))
    except DecodeError:
        raise BadRequest("the body is no ForwardBackwardRequest of the Tinker API") from None
    if sent.seq_id < 1:
        raise BadRequest(f"seq_id={sent.seq_id} must be 1 or more")
    if len(sent.data) > limits.datums:
        raise BadRequest(f"{len(sent.data)} datums in one request are more than {limits.datums} (serve.chunk_datums)")
    if not sent.data:
        raise BadRequest("a request needs a datum")
    config: dict[str, float | str] = dict(sent.loss_fn_config)
    for name, value in sent.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    data = tuple(_datum(datum, f"datum {k}", limits) for k, datum in enumerate(sent.data))
    return ForwardBackward(sent.model_id, sent.seq_id, data, sent.loss_fn, config, sent.forward_only)


def _datum(sent, place: str, limits: Limits) -> Datum:
    parts = []
    for chunk in sent.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise BadRequest(f"{place}: a chunk of type {kind} is not supported; give text")
        parts.append(_array(chunk.encoded_text.tokens, np.dtype(np.int32), f"{place}: tokens"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if not 0 < len(tokens) < limits.tokens:
        raise BadRequest(f"{place} has {len(tokens)} tokens; give 1 to {limits.tokens - 1} (batch.max_tokens)")
    inputs = {name: _tensor(tensor, f"{place}: {name}") for name, tensor in sorted(sent.loss_fn_inputs.items())}
    if "target_tokens" not in inputs:
        raise BadRequest(f"{place} has no target_tokens; it has {', '.join(inputs) or 'none'}")
    targets = inputs["target_tokens"]
    if targets.dtype != np.int64:
        raise BadRequest(f"{place}: target_tokens is {targets.dtype}; give int64")
    for name, values in inputs.items():
        if len(values) != len(tokens) or values.shape not in (targets.shape, targets.shape[:1]):
            raise BadRequest(
                f"{place}: {name} has shape {values.shape}, but there are {len(tokens)} tokens, and target_tokens of "
                f"shape {targets.shape}"
            )
        if values.dtype == np.float32 and not np.isfinite(values).all():
            raise BadRequest(f"{place}: {name} has a number that is not finite")
    if tokens.min() < 0 or targets.min() < 0:
        raise BadRequest(f"{place} has a negative token")
    return Datum(tokens, inputs)


def _tensor(sent, place: str) -> np.ndarray:
    if sent.dtype not in DTYPES:
        raise BadRequest(f"{place}: dtype {sent.dtype} is not supported; give float32 or int64")
    dtype, shape = DTYPES[sent.dtype], tuple(sent.shape)
    if sent.WhichOneof("encoding") == "sparse_csr":
        return _from_csr(sent.sparse_csr, dtype, shape, place)
    values = _array(sent.dense, dtype, place)
    shape = shape or values.shape
    if len(shape) not in (1, 2) or any(size < 0 for size in shape) or int(np.prod(shape)) != len(values):
        raise BadRequest(f"{place}: {len(values)} numbers are not of shape {shape}, [N] or [N, K]")
    return values.reshape(shape)


def _from_csr(sent, dtype: np.dtype, shape: tuple[int, ...], place: str) -> np.ndarray:
    """Return the dense [N, K] of compressed rows: 0 where nothing is stored."""
    values = _array(sent.values, dtype, place)
    rows, columns = (_array(part, np.dtype(np.int64), place) for part in (sent.crow_indices, sent.col_indices))
    if len(shape) != 2 or not 0 <= shape[0] * shape[1] <= CHUNK * 64 or len(rows) != shape[0] + 1:
        raise BadRequest(f"{place}: {len(rows)} row pointers are not of shape {shape}")
    counts = np.diff(rows)
    if rows[0] != 0 or rows[-1] != len(values) or (counts < 0).any() or len(columns) != len(values):
        raise BadRequest(f"{place}: row pointers, columns and values of a sparse tensor do not fit each other")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise BadRequest(f"{place}: a column of a sparse tensor is not below {shape[1]}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _array(data: bytes, dtype: np.dtype, place: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise BadRequest(f"{place}: {len(data)} bytes are no whole number of {dtype}")
    return np.frombuffer(data, dtype)


def forward_backward_answer(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput. logprobs: float32 [N] or [N, K] of each datum.

    Raises ValueError for a metric whose name the SDK would drop: NAME:REDUCTION, one of SUFFIXES.
    """
    answer = message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    record = answer.loss_fn_outputs.add(num_datums=len(logprobs))
    rows = [np.ascontiguousarray(row, np.float32) for row in logprobs]
    batched = record.fields["logprobs"]
    batched.dtype = FLOAT32
    batched.data = b"".join(row.tobytes() for row in rows)
    batched.offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype(np.int64).tobytes()
    batched.trailing_shape.extend(rows[0].shape[1:] if rows else ())
    for name, value in metrics.items():
        if name.count(":") != 1 or name.split(":")[1] not in SUFFIXES:
            raise ValueError(f"metric {name!r} must be NAME:REDUCTION with one of {', '.join(SUFFIXES)}")
        answer.metrics[name] = value
    return answer.SerializeToString(deterministic=True)


def sample_answer(
    sequences: Sequence[Sampled],
    prompt_logprobs: np.ndarray | None = None,
    topk_prompt_logprobs: tuple[np.ndarray, np.ndarray] | None = None,
) -> bytes:
    """Return a SampleResponse.

    prompt_logprobs: float32 [T], NaN for the first token.
    topk_prompt_logprobs: int32 ids and float32 log-probabilities, [T, K]; a log-probability of -99999 is none.
    """
    answer = message("SampleResponse")()
    for sequence in sequences:
        answer.sequences.add(
            stop_reason=STOP[sequence.stop_reason],
            tokens=np.asarray(sequence.tokens, np.int32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        answer.prompt_logprobs = np.asarray(prompt_logprobs, np.float32).tobytes()
    if topk_prompt_logprobs is not None:
        ids, values = topk_prompt_logprobs
        top = answer.topk_prompt_logprobs
        top.token_ids, top.logprobs = ids.astype(np.int32).tobytes(), values.astype(np.float32).tobytes()
        top.length, top.k = ids.shape
    return answer.SerializeToString(deterministic=True)
