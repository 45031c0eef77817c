"""Requests of Tinker's API as its SDK sends them, and their answers as numbers. The SDK itself is not needed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard

from isoloss.tools.prove.serve.session import Call, Completions, Datum
from isoloss.tools.serve import messages

DTYPES = {"int64": messages.INT64, "float32": messages.FLOAT32}
# The numbers of an answer, by name: float64 where they travel as text or double, else float32 and int32.
Numbers = dict[str, np.ndarray]


def chunks_of(call: Call, datums: int) -> list[Call]:
    """Return the parts in which a call is sent."""
    starts = range(0, len(call.data), datums)
    return [Call(call.data[at : at + datums], call.loss_fn, call.options, call.forward_only) for at in starts]


def call_body(call: Call, model: str, seq: int) -> bytes:
    """Return the body of a forward_backward request, compressed with zstd."""
    message = messages.new("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = model, seq, call.loss_fn
    message.forward_only = call.forward_only
    for name, value in call.options.items():
        message.loss_fn_config[name] = message.loss_fn_config_v2[name].number = value
    for datum in call.data:
        _write(message.data.add(), datum)
    return zstandard.compress(message.SerializeToString())


def _write(message: Any, datum: Datum) -> None:
    message.model_input.add().encoded_text.tokens = np.asarray(datum.tokens, "<i4").tobytes()
    for name, array in datum.inputs.items():
        tensor = message.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = DTYPES[str(array.dtype)], array.tobytes()
        tensor.shape.extend(array.shape)


def call_numbers(parts: Sequence[bytes]) -> Numbers:
    """Return the sum of losses and all log-probabilities of a call, from the answers to its parts."""
    loss, logprobs = 0.0, []
    for part in parts:
        output = messages.new("ForwardBackwardOutput")
        output.ParseFromString(part)
        loss += output.metrics["loss:sum"]
        logprobs += [np.frombuffer(record.fields["logprobs"].data, "<f4") for record in output.loss_fn_outputs]
    return {"loss": np.array(loss), "logprobs": np.concatenate(logprobs)}


def completions_body(asked: Completions, sampler: str, seq: int) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(asked.prompt)}]},
        "num_samples": asked.samples,
        "sampling_params": {"max_tokens": asked.tokens, "seed": asked.seed, "temperature": asked.temperature},
        "prompt_logprobs": True,
    }


def completions_numbers(answer: bytes) -> Numbers:
    """Return tokens and log-probabilities of completions, one behind the other, and those of the prompt."""
    response = messages.new("SampleResponse")
    response.ParseFromString(answer)
    sequences = response.sequences
    return {
        "lengths": np.array([len(each.tokens) // 4 for each in sequences]),
        "tokens": np.concatenate([np.frombuffer(each.tokens, "<i4") for each in sequences]),
        "logprobs": np.concatenate([np.frombuffer(each.logprobs, "<f4") for each in sequences]),
        "prompt": np.frombuffer(response.prompt_logprobs, "<f4")[1:],
    }


def step_numbers(metrics: Mapping[str, float]) -> Numbers:
    return {name: np.array(float(metrics[name])) for name in ("grad_norm", "applied")}
