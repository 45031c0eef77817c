"""The wire against Tinker's own SDK, in an environment of its own: what it sends is read, what we answer it reads."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import json_format

from isoloss.tools.serve import messages, wire
from isoloss.tools.serve.arrays import Limits

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".tinker-venv/bin/python"
LIMITS = Limits(body_bytes=10**6, decompressed_bytes=10**6, datums=100, tokens=1000)
ROWS = [np.array([-0.1, -2.0]), np.array([[-1.0, -2.0, -3.0]]), np.array([-4.5]), np.array([[-5.0], [-6.0]])]
METRICS = {"loss:sum": 2.5, "micro_batches:max": 3.0}
TOPK = wire.TopK(np.array([[4, 0], [0, 0], [9, 2]]), np.array([[-0.5, -1.5], [-99999.0, -99999.0], [-0.25, -3.0]]))
SAMPLED = [
    wire.Sampled(np.array([3, 0, 7]), np.array([-0.5, -1.0, -0.125]), "stop", TOPK),
    wire.Sampled(np.array([1, 2]), np.array([-2.0, -0.75]), "length"),
]

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.skipif(not PYTHON.exists(), reason="make .tinker-venv/.ready installs the SDK"),
    pytest.mark.xdist_group("tinker"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdk")
    (folder / "ragged.forward").write_bytes(wire.forward_backward_answer(ROWS, METRICS))
    (folder / "none.forward").write_bytes(wire.forward_backward_answer([], METRICS))
    (folder / "all.sample").write_bytes(wire.sample_answer(SAMPLED, np.array([np.nan, -1.5]), TOPK))
    (folder / "least.sample").write_bytes(wire.sample_answer(SAMPLED[1:]))
    script = Path(__file__).with_name("sdk_side.py")
    done = subprocess.run([PYTHON, script, folder], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def flat(message: dict, package: str) -> dict[str, tuple]:
    """Each field of a message: number, type, label, name of its oneof, whether it has presence."""
    oneofs = [declared["name"] for declared in message.get("oneofDecl", ())]
    fields = {
        field["name"]: (
            field["number"],
            field["type"],
            field["label"],
            field.get("typeName", "").removeprefix(f".{package}."),
            oneofs[field["oneofIndex"]] if "oneofIndex" in field else None,
            field.get("proto3Optional", False),
        )
        for field in message.get("field", ())
    }
    for nested in message.get("nestedType", ()):
        assert nested["options"] == {"mapEntry": True}
        fields |= {f"{nested['name']}.{name}": row for name, row in flat(nested, package).items()}
    return fields


def test_fields_are_those_of_the_sdk(folder):
    theirs, ours = read(folder, "descriptors"), json_format.MessageToDict(messages.file_of_messages())
    assert sorted(wire.REDUCTIONS) == theirs["reductions"]
    theirs = theirs["file"]
    assert theirs["syntax"] == ours["syntax"]
    known = {message["name"]: flat(message, theirs["package"]) for message in theirs["messageType"]}
    for message in ours["messageType"]:
        fields = flat(message, messages.PACKAGE)
        assert fields.items() <= known[message["name"]].items(), message["name"]
    values = {
        enum["name"]: [(value["name"], value["number"]) for value in enum["value"]] for enum in theirs["enumType"]
    }
    assert values == {
        enum["name"]: [(value["name"], value["number"]) for value in enum["value"]] for enum in ours["enumType"]
    }


def test_fields_that_are_not_read_are_known(folder):
    """A new field of a request may ask for what the server must not ignore: this list is to be looked at then."""
    file = read(folder, "descriptors")["file"]
    known = {message["name"]: flat(message, file["package"]) for message in file["messageType"]}
    unread = {
        f"{name}.{field}"
        for name, rows in messages.MESSAGES.items()
        for field in known[name].keys() - {row.name for row in rows}
        if "Entry." not in field
    }
    assert {field for field in unread if not field.startswith(("ImageChunk", "DmelChunk"))} == {
        "Datum.model_input_spans",
        "Datum.loss_fn_input_spans",
        "ArrayRecord.type_tag",
        "SampleResponse.prompt_cache_hit_tokens",
        "SampleResponse.target_prompt_logprobs",
        "SampleResponse.prompt_alt_tokens",
    }


@pytest.mark.parametrize("name", ["dense", "zstd", "sparse"])
def test_what_the_client_sends_is_read(folder, name):
    sent = read(folder, "requests")[name]
    request = wire.read_forward_backward((folder / f"{name}.request").read_bytes(), sent["encoding"], LIMITS)
    assert sent["encoding"] == ("zstd" if name == "zstd" else None)
    assert (request.model_id, request.seq_id, request.loss_fn) == ("s:train:0", sent["seq_id"], sent["loss_fn"])
    assert (request.config, request.forward_only) == (sent["config"], sent["forward_only"])
    assert len(request.data) == len(sent["data"])
    for datum, expected in zip(request.data, sent["data"], strict=True):
        assert datum.tokens.dtype == np.int64 and datum.tokens.tolist() == expected["tokens"]
        assert datum.inputs.keys() == expected["inputs"].keys()
        for key, (dtype, values) in expected["inputs"].items():
            assert datum.inputs[key].dtype == dtype
            np.testing.assert_array_equal(datum.inputs[key], np.array(values, dtype))


def test_the_client_reads_the_log_probabilities_of_every_target(folder):
    answers = read(folder, "answers")
    got = answers["ragged.forward"]
    assert got["metrics"] == METRICS and got["dtypes"] == ["float32"] * 4
    assert got["shapes"] == [list(row.shape) for row in ROWS]
    for row, expected in zip(got["logprobs"], ROWS, strict=True):
        np.testing.assert_array_equal(np.array(row, np.float32), expected.astype(np.float32))
    assert (answers["none.forward"]["logprobs"], answers["none.forward"]["metrics"]) == ([], METRICS)


def test_the_client_reads_what_was_sampled(folder):
    answers = read(folder, "answers")
    got, least = answers["all.sample"], answers["least.sample"]
    # A position whose entries are all missing is None.
    topk = [[[4, -0.5], [0, -1.5]], None, [[9, -0.25], [2, -3.0]]]
    second = {"tokens": [1, 2], "logprobs": [-2.0, -0.75], "stop_reason": "length", "topk": None}
    assert got["sequences"] == [
        {"tokens": [3, 0, 7], "logprobs": [-0.5, -1.0, -0.125], "stop_reason": "stop", "topk": topk},
        second,
    ]
    assert (got["prompt_logprobs"], got["topk_prompt_logprobs"]) == ([None, -1.5], topk)
    assert least == {"sequences": [second], "prompt_logprobs": None, "topk_prompt_logprobs": None}
