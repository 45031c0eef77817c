"""Bytes of Tinker's API, and the nouns that the server computes with.

A `forward_backward` request is protobuf, perhaps compressed with zstd; so are the answers to it and to `asample`.
Whatever bytes arrive, reading them ends with a noun that is right in every particular, or with one BadRequest. Needs
no torch: the process that talks to clients does not load it.

Shapes: T tokens of a datum, K targets at a position, N sampled tokens or rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError

from isoloss.tools.serve import messages
from isoloss.tools.serve.arrays import BadRequest, Limits, Room, decompressed, numbers, shown, tensor

# Last parts of a metric's key, by which the client combines the metrics of a call that it cut into several.
REDUCTIONS = ("mean", "sum", "min", "max", "slack", "hash2", "unique")
TARGETS = "target_tokens"
NO_LOGPROB = -99999.0  # of a token among the likeliest where there is none


@dataclass(frozen=True, eq=False)
class Datum:
    """A sequence, and the numbers that a loss needs at each of its positions.

    tokens: int64 [T], the input of the model.
    inputs: arrays by name, read-only, all of one shape [T] or [T, K], with `target_tokens` (int64) among them; all
      others are float32. Row t belongs to the model's output at position t: targets need not be the shifted tokens.

    The client sends a target_tokens or weights of two dimensions as compressed sparse rows (CSR) if most of it is 0,
    each without its own zeros, so a target of id 0 is missing in the one and present in the other. Here both are dense
    again, every entry in its own column, and what was not sent is 0: an entry k of a row is the target
    target_tokens[t, k] with the weight weights[t, k].
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """A request for the loss of data, and for its gradient unless forward_only.

    seq_id: the place of the request in its model's order, from 1; None if the client gave none.
    config: options of the loss, by name.
    """

    model_id: str
    seq_id: int | None
    data: tuple[Datum, ...]
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True, eq=False)
class TopK:
    """The k likeliest tokens at each of N positions, likeliest first.

    tokens: integers [N, k].
    logprobs: [N, k]. An entry that does not exist has token 0 and log-probability NO_LOGPROB.
    """

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, eq=False)
class Sampled:
    """A sampled sequence.

    tokens: integers [N].
    logprobs: [N], their log-probabilities.
    stop_reason: "stop" at a stop token, "length" at the most tokens that were asked for.
    topk: the likeliest tokens at each of the N positions, if they were asked for.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None


def read_forward_backward(body: bytes, encoding: str | None, limits: Limits) -> ForwardBackward:
    """Return what a request asks for. encoding: the header Content-Encoding, or None.

    Where tokens come from (provenance spans) is not read: no loss that the server has depends on it. Raises BadRequest.
    """
    limits.check("body_bytes", len(body), f"the body has {len(body)} bytes")
    message = messages.new("ForwardBackwardRequest")
    try:
        message.ParseFromString(decompressed(body, encoding, limits))
    except DecodeError as error:
        raise BadRequest("the body is not a protobuf ForwardBackwardRequest: use tinker>=0.25") from error
    for name in ("model_id", "loss_fn"):
        if not getattr(message, name):
            raise BadRequest(f"{name} is missing: the request must name it")
    if message.seq_id < 0:
        raise BadRequest(f"seq_id={message.seq_id}: the requests of a model are numbered from 1")
    if not message.data:
        raise BadRequest("data is empty: a request needs a datum")
    limits.check("datums", len(message.data), f"data has {len(message.data)} datums")
    room = Room(limits)
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id or None,
        data=tuple(_datum(f"data[{i}]", datum, room) for i, datum in enumerate(message.data)),
        loss_fn=message.loss_fn,
        config=_config(message),
        forward_only=message.forward_only,
    )


def forward_backward_answer(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return the answer to a forward_backward: the log-probability of every target.

    logprobs: for each datum, in the order of the request, an array of the shape of its target_tokens, [T] or [T, K].
    metrics: numbers whose key ends with how the client reduces them, such as "loss:sum".
    """
    output = messages.new("ForwardBackwardOutput")
    output.loss_fn_output_type = "ArrayRecord"
    # The rows of a record have one K. The client joins the records.
    for trailing, group in groupby(logprobs, key=lambda row: row.shape[1:]):
        rows = [np.ascontiguousarray(row, "<f4") for row in group]
        record = output.loss_fn_outputs.add(num_datums=len(rows))
        field = record.fields["logprobs"]
        field.dtype = messages.FLOAT32
        field.data = b"".join(row.tobytes() for row in rows)
        field.offsets = np.cumsum([0, *(row.nbytes for row in rows)], dtype="<i8").tobytes()
        field.trailing_shape.extend(trailing)
    for key, value in metrics.items():
        name, _, reduction = key.partition(":")
        if not name or reduction not in REDUCTIONS:
            raise ValueError(f"the metric {key!r} must be NAME:REDUCTION, with one of {', '.join(REDUCTIONS)}")
        output.metrics[key] = value
    # In one order: a repeated request gets the same bytes.
    return output.SerializeToString(deterministic=True)


def sample_answer(
    sequences: Sequence[Sampled],
    prompt_logprobs: np.ndarray | None = None,
    topk_prompt_logprobs: TopK | None = None,
) -> bytes:
    """Return the answer to an asample.

    prompt_logprobs: log-probability of each token of the prompt; NaN where there is none, as at the first.
    topk_prompt_logprobs: the likeliest tokens at each position of the prompt.
    """
    response = messages.new("SampleResponse")
    for sampled in sequences:
        if sampled.tokens.shape != sampled.logprobs.shape or sampled.tokens.ndim != 1:
            raise ValueError(f"tokens {sampled.tokens.shape} and logprobs {sampled.logprobs.shape} must be of one [N]")
        sequence = response.sequences.add(
            stop_reason={"stop": messages.STOP, "length": messages.LENGTH}[sampled.stop_reason],
            tokens=_int32(sampled.tokens),
            logprobs=sampled.logprobs.astype("<f4").tobytes(),
        )
        if sampled.topk is not None:
            _write_topk(sequence.topk_sampled_logprobs, sampled.topk)
    if prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    if topk_prompt_logprobs is not None:
        _write_topk(response.topk_prompt_logprobs, topk_prompt_logprobs)
    return response.SerializeToString(deterministic=True)


def _write_topk(message: Any, topk: TopK) -> None:
    if topk.tokens.shape != topk.logprobs.shape or topk.tokens.ndim != 2:
        raise ValueError(f"tokens {topk.tokens.shape} and logprobs {topk.logprobs.shape} must be of one [N, k]")
    message.length, message.k = topk.tokens.shape
    message.token_ids = _int32(topk.tokens)
    message.logprobs = topk.logprobs.astype("<f4").tobytes()


def _int32(tokens: np.ndarray) -> bytes:
    return tokens.astype("<i4").tobytes()


def _config(message: Any) -> dict[str, float | str]:
    """Return the options of the loss: of the newer map, which clients fill as well as the older one."""
    options: dict[str, float | str] = {}
    for name, value in sorted(message.loss_fn_config_v2.items()):
        kind = value.WhichOneof("value")
        if kind is None:
            raise BadRequest(f"loss_fn_config[{shown(name)}] has no value: give a number or a text")
        options[name] = getattr(value, kind)
    for name, number in sorted(message.loss_fn_config.items()):
        if options.setdefault(name, number) != number and np.isfinite(number):
            raise BadRequest(f"loss_fn_config[{shown(name)}] has two values: send one")
    for name, value in options.items():
        if isinstance(value, float) and not np.isfinite(value):
            raise BadRequest(f"loss_fn_config[{shown(name)}]={value}: give a finite number")
    return options


def _datum(where: str, message: Any, room: Room) -> Datum:
    tokens = _tokens(where, message.model_input, room)
    if TARGETS not in message.loss_fn_inputs:
        raise BadRequest(f"{where} has no {TARGETS} among its loss_fn_inputs: every loss needs them")
    # The order of a map is that of a hash: sorted, the noun is a function of the request.
    inputs = {
        name: tensor(f"{where}.loss_fn_inputs[{shown(name)}]", sent, len(tokens), room)
        for name, sent in sorted(message.loss_fn_inputs.items())
    }
    targets = inputs[TARGETS]
    for name, array in inputs.items():
        wanted = "int64" if name == TARGETS else "float32"
        if array.dtype != wanted:
            raise BadRequest(f"{where}.loss_fn_inputs[{shown(name)}] is {array.dtype}: send {wanted}")
        if array.shape != targets.shape:
            what = f"{where}.loss_fn_inputs[{shown(name)}] has the shape {array.shape}"
            raise BadRequest(f"{what}, and {TARGETS} {targets.shape}: send both in one shape")
    if targets.min() < 0:
        raise BadRequest(f"{where}.loss_fn_inputs[{TARGETS!r}] has the token {targets.min()}: tokens are not negative")
    return Datum(tokens, inputs)


def _tokens(where: str, chunks: Any, room: Room) -> np.ndarray:
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise BadRequest(f"{where}.model_input has a chunk of kind {kind}: this server takes encoded_text only")
        parts.append(numbers(f"{where}.model_input", chunk.encoded_text.tokens, np.dtype("<i4")))
    count = sum(map(len, parts))
    if count == 0:
        raise BadRequest(f"{where}.model_input has no token: every datum needs one")
    room.limits.check("tokens", count, f"{where}.model_input has {count} tokens")
    room.take(where, 8 * count)
    tokens = np.concatenate(parts).astype(np.int64)
    if tokens.min() < 0:
        raise BadRequest(f"{where}.model_input has the token {tokens.min()}: tokens are not negative")
    tokens.flags.writeable = False
    return tokens
