"""The wire without the SDK: bodies are written with our own messages, byte by byte where that matters."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloss.tools.serve import messages, wire
from isoloss.tools.serve.arrays import BadRequest, Limits
from isoloss.tools.serve.wire import read_forward_backward

LIMITS = Limits(body_bytes=4000, decompressed_bytes=8000, datums=3, tokens=50)
TARGETS = "target_tokens"


def put(message: Any, array: Any, dtype: int, shape: tuple[int, ...] | None = None) -> None:
    array = np.asarray(array, {messages.INT64: "<i8", messages.INT32: "<i4"}.get(dtype, "<f4"))
    message.dtype = dtype
    del message.shape[:]
    message.shape.extend(array.shape if shape is None else shape)
    message.dense = array.tobytes()


def put_sparse(message: Any, values: Any, crow: list[int], col: list[int], dtype: int, shape: tuple[int, ...]) -> None:
    put(message, [], dtype, shape)
    message.sparse_csr.values = np.asarray(values, "<i8" if dtype == messages.INT64 else "<f4").tobytes()
    message.sparse_csr.crow_indices = np.asarray(crow, "<i8").tobytes()
    message.sparse_csr.col_indices = np.asarray(col, "<i8").tobytes()


def request(change: Callable[[Any], object] = lambda m: None) -> bytes:
    """A request with a datum of three tokens, after a change."""
    message = messages.new("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = "s:train:0", 7, "ppo"
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.75
    message.loss_fn_config["clip_low_threshold"] = 0.75
    message.loss_fn_config_v2["mode"].text = "a"
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([4, 0], "<i4").tobytes()
    datum.model_input.add().encoded_text.tokens = np.array([9], "<i4").tobytes()
    put(datum.loss_fn_inputs[TARGETS], [0, 9, 2], messages.INT64)
    put(datum.loss_fn_inputs["weights"], [0.5, -1.0, 0.0], messages.FLOAT32)
    change(message)
    return message.SerializeToString()


def inputs_of(message: Any) -> Any:
    return message.data[0].loss_fn_inputs


def test_a_request_is_read():
    for body, encoding in (
        (request(), None),
        (request(), "identity"),
        (zstandard.ZstdCompressor().compress(request()), "zstd"),
        (zstandard.ZstdCompressor(level=19, write_content_size=False).compress(request()), "zstd"),
    ):
        read = read_forward_backward(body, encoding, LIMITS)
        assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == ("s:train:0", 7, "ppo", False)
        assert read.config == {"clip_low_threshold": 0.75, "mode": "a"}
        [datum] = read.data
        assert datum.tokens.dtype == np.int64 and datum.tokens.tolist() == [4, 0, 9]
        assert list(datum.inputs) == [TARGETS, "weights"]
        assert datum.inputs[TARGETS].dtype == np.int64 and datum.inputs[TARGETS].tolist() == [0, 9, 2]
        assert datum.inputs["weights"].dtype == np.float32 and datum.inputs["weights"].tolist() == [0.5, -1.0, 0.0]


def test_a_request_without_a_number_and_without_the_newer_options():
    def change(message):
        message.seq_id, message.forward_only = 0, True
        message.loss_fn_config_v2.clear()
        del inputs_of(message)[TARGETS].shape[:]

    read = read_forward_backward(request(change), None, LIMITS)
    assert (read.seq_id, read.forward_only, read.config) == (None, True, {"clip_low_threshold": 0.75})
    assert read.data[0].inputs[TARGETS].shape == (3,)


def test_sparse_targets_and_weights_stay_in_their_columns():
    """Target 0 of the first row is not sent, nor weight 0 of the last: their partners are."""

    def change(message):
        put_sparse(inputs_of(message)[TARGETS], [5, 8, 6], [0, 1, 1, 3], [1, 0, 1], messages.INT64, (3, 2))
        put_sparse(inputs_of(message)["weights"], [0.25, 0.75, 1], [0, 2, 2, 3], [0, 1, 1], messages.FLOAT32, (3, 2))

    [datum] = read_forward_backward(request(change), None, LIMITS).data
    assert datum.inputs[TARGETS].tolist() == [[0, 5], [0, 0], [8, 6]]
    assert datum.inputs["weights"].tolist() == [[0.25, 0.75], [0, 0], [0, 1]]


def test_what_is_at_a_limit_is_read():
    def change(message):
        message.data.add().CopyFrom(message.data[0])

    body = request(change)
    # Three tokens and targets of 8 bytes, weights of 4, twice: fewer than the body has.
    read_forward_backward(body, None, Limits(len(body), len(body), 2, 3))
    packed = zstandard.ZstdCompressor().compress(body)
    read_forward_backward(packed, "zstd", Limits(len(packed), len(body), 2, 3))


def sparse(crow, col, shape=(3, 2), values=(5, 8, 6)):
    return lambda message: put_sparse(inputs_of(message)[TARGETS], values, crow, col, messages.INT64, shape)


def weights(array, dtype=messages.FLOAT32, shape=None):
    return lambda message: put(inputs_of(message)["weights"], array, dtype, shape)


def targets(array, dtype=messages.INT64, shape=None):
    return lambda message: put(inputs_of(message)[TARGETS], array, dtype, shape)


REFUSED = {
    "no model": (lambda m: m.ClearField("model_id"), "model_id is missing"),
    "no loss": (lambda m: m.ClearField("loss_fn"), "loss_fn is missing"),
    "negative number": (lambda m: setattr(m, "seq_id", -1), "seq_id=-1"),
    "no data": (lambda m: m.ClearField("data"), "data is empty"),
    "datums": (lambda m: m.data.extend([m.data[0]] * 3), "data has 4 datums: serve.max_datums=3"),
    "no tokens": (lambda m: m.data[0].ClearField("model_input"), r"data\[0\].model_input has no token"),
    "tokens": (
        lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", bytes(4 * 50)),
        "has 51 tokens: serve.max_tokens=50",
    ),
    "bytes of tokens": (lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", bytes(7)), "has 7 bytes"),
    "negative token": (
        lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", np.array([1, -2], "<i4").tobytes()),
        "model_input has the token -2",
    ),
    "image": (lambda m: m.data[0].model_input[1].image.SetInParent(), "a chunk of kind image"),
    "dmel": (lambda m: m.data[0].model_input[1].dmel.SetInParent(), "a chunk of kind dmel"),
    "no chunk": (lambda m: m.data[0].model_input[1].Clear(), "a chunk of kind None"),
    "no targets": (lambda m: inputs_of(m).pop(TARGETS), f"no {TARGETS}"),
    "negative target": (targets([1, -1, 0]), "has the token -1"),
    "float targets": (targets([1, 1, 1], messages.FLOAT32), "is float32: send int64"),
    "integer weights": (weights([1, 1, 1], messages.INT64), "is int64: send float32"),
    "int32": (weights([1, 1, 1], messages.INT32), "dtype DTYPE_INT32"),
    "no dtype": (weights([1, 1, 1], messages.UNSPECIFIED), "dtype DTYPE_UNSPECIFIED"),
    "unknown dtype": (weights([1, 1, 1], 77), "dtype number 77"),
    "short weights": (weights([1, 1]), r"weights'\] has the shape \(2,\): the tokens ask for \(3,\)"),
    "long targets": (targets([1, 1, 1, 1]), r"has the shape \(4,\)"),
    "two shapes": (weights(np.ones((3, 2))), r"has the shape \(3, 2\), and target_tokens \(3,\)"),
    "no column": (targets([], shape=(3, 0)), r"has the shape \(3, 0\)"),
    "three dimensions": (targets([1, 1, 1], shape=(3, 1, 1)), r"has the shape \(3, 1, 1\)"),
    "many dimensions": (targets([1, 1, 1], shape=(3,) + (1,) * 99), "of 100 dimensions"),
    "negative size": (targets([1, 1, 1], shape=(3, -1)), r"has the shape \(3, -1\)"),
    "fewer numbers": (targets([1, 1], shape=(3,)), "and 2 numbers"),
    "NaN": (weights([0, np.nan, 0]), "NaN or infinite"),
    "infinite": (weights([0, -np.inf, 0]), "NaN or infinite"),
    "huge": (sparse([0, 1, 1, 3], [1, 0, 1], (3, 2**62)), "serve.max_decompressed_bytes=8000"),
    "arrays": (sparse([0, 1, 1, 3], [1, 0, 1], (3, 334)), "serve.max_decompressed_bytes=8000"),
    "sparse vector": (sparse([0, 1, 1, 3], [1, 0, 1], (3,)), "sparse tensors have two dimensions"),
    "rows of another size": (sparse([0, 1, 3], [1, 0, 1]), "crow_indices"),
    "rows from 1": (sparse([1, 1, 1, 3], [1, 0, 1]), "crow_indices"),
    "rows that fall": (sparse([0, 4, 1, 3], [1, 0, 1]), "crow_indices"),
    "rows past the end": (sparse([0, 1, 1, 4], [1, 0, 1]), "crow_indices"),
    "columns past the end": (sparse([0, 1, 1, 3], [1, 0, 2]), "col_indices"),
    "negative column": (sparse([0, 1, 1, 3], [-1, 0, 1]), "col_indices"),
    "fewer columns": (sparse([0, 1, 1, 3], [1, 0]), "col_indices"),
    "a column twice": (sparse([0, 1, 1, 3], [1, 1, 1]), "col_indices of a row"),
    "an option without value": (lambda m: m.loss_fn_config_v2["beta"].SetInParent(), "'beta'. has no value"),
    "an infinite option": (lambda m: setattr(m.loss_fn_config_v2["beta"], "number", np.inf), r"'beta'\]=inf"),
    "an infinite old option": (lambda m: m.loss_fn_config.update(beta=np.nan), r"'beta'\]=nan"),
    "an option twice": (lambda m: m.loss_fn_config.update(clip_low_threshold=0.5), "has two values"),
    "a long name of several lines": (lambda m: inputs_of(m)["\n" * 200].SetInParent(), r"\.\.\.'\] has the dtype"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_request_is_refused_in_one_line(name):
    change, message = REFUSED[name]
    with pytest.raises(BadRequest, match=message) as error:
        read_forward_backward(request(change), None, LIMITS)
    assert "\n" not in str(error.value) and len(str(error.value)) < 350


PACKED = zstandard.ZstdCompressor().compress(request())
BOMB = zstandard.ZstdCompressor().compress(bytes(2**24))
BODIES = {
    "no protobuf": (b"\x0a\xff", None, "not a protobuf"),
    "bytes": (bytes(4001), None, "4001 bytes: serve.max_body_bytes=4000"),
    "gzip": (request(), "gzip", "Content-Encoding 'gzip'"),
    "not zstd": (request(), "zstd", "not zstd"),
    "not declared": (PACKED, None, "not a protobuf"),
    "empty": (b"", "zstd", "not one whole frame"),
    "cut": (PACKED[:-5], "zstd", "not one whole frame"),
    "more behind": (PACKED + b"x", "zstd", "not zstd|not one whole frame"),
    "two frames": (PACKED + PACKED, "zstd", "not one whole frame"),
    "bomb": (BOMB, "zstd", "serve.max_decompressed_bytes=8000"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_body_is_refused_in_one_line(name):
    body, encoding, message = BODIES[name]
    with pytest.raises(BadRequest, match=message) as error:
        read_forward_backward(body, encoding, LIMITS)
    assert "\n" not in str(error.value)


def test_bytes_without_compression_count_as_decompressed():
    with pytest.raises(BadRequest, match="max_decompressed_bytes=10 "):
        read_forward_backward(request(), None, Limits(10**6, 10, 10, 10))


def read_or_refuse(body: bytes, encoding: str | None) -> None:
    try:
        read = read_forward_backward(body, encoding, LIMITS)
    except BadRequest as error:
        assert "\n" not in str(error)
        return
    for datum in read.data:
        shape = datum.inputs[TARGETS].shape
        assert shape[0] == len(datum.tokens) and datum.tokens.min() >= 0
        assert all(array.shape == shape and np.isfinite(array).all() for array in datum.inputs.values())


@given(st.binary(max_size=200), st.sampled_from([None, "zstd"]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(body, encoding):
    read_or_refuse(body, encoding)


VALID = request(sparse([0, 1, 1, 3], [1, 0, 1])), request()


@given(st.sampled_from(VALID), st.lists(st.tuples(st.integers(0), st.binary(max_size=9)), max_size=4), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_damaged_request_is_read_or_refused(body, damage, packed):
    if packed:
        body = zstandard.ZstdCompressor().compress(body)
    for place, bytes_ in damage:
        start = place % len(body)
        body = body[:start] + bytes_ + body[start + len(bytes_) :]
    read_or_refuse(body, "zstd" if packed else None)


def test_an_answer_has_byte_offsets_and_a_record_for_each_run_of_one_width():
    rows = [np.array([-1.5, -2.0]), np.array([-3.0]), np.full((2, 3), -4.0)]
    answer = messages.new("ForwardBackwardOutput")
    answer.ParseFromString(wire.forward_backward_answer(rows, {"loss:sum": 1.5}))
    assert dict(answer.metrics) == {"loss:sum": 1.5} and answer.loss_fn_output_type == "ArrayRecord"
    assert [record.num_datums for record in answer.loss_fn_outputs] == [2, 1]
    first, second = (record.fields["logprobs"] for record in answer.loss_fn_outputs)
    assert np.frombuffer(first.offsets, "<i8").tolist() == [0, 8, 12]
    assert np.frombuffer(second.offsets, "<i8").tolist() == [0, 24]
    assert (list(first.trailing_shape), list(second.trailing_shape)) == ([], [3])
    assert np.frombuffer(first.data, "<f4").tolist() == [-1.5, -2.0, -3.0]
    assert {first.dtype, second.dtype} == {messages.FLOAT32}


@pytest.mark.parametrize("key", ["loss", "loss:avg", "loss:", ":sum", "a:loss:sum"])
def test_a_metric_that_the_client_would_lose_is_refused(key):
    with pytest.raises(ValueError, match=f"'{key}'"):
        wire.forward_backward_answer([], {key: 1.0})


def test_a_sampled_sequence_without_all_its_log_probabilities_is_refused():
    two, one = np.zeros(2), np.zeros(1)
    for sampled in (wire.Sampled(two, one, "stop"), wire.Sampled(two, two, "stop", wire.TopK(two, two))):
        with pytest.raises(ValueError, match=r"\(2,\)"):
            wire.sample_answer([sampled])


def test_the_wire_needs_no_torch():
    code = (
        "import sys; import isoloss.tools.serve.wire; print(*{name.split('.')[0] for name in sys.modules} & {'torch', "
        "'megatron', 'transformers'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
