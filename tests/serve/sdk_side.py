"""Run in .tinker-venv, where isoloss is not: `python sdk_side.py FOLDER`. Uses the SDK's own client code.

Writes FOLDER/descriptors.json, the messages of the SDK; FOLDER/NAME.request, bodies as the client posts them, with
what they hold in FOLDER/requests.json. Reads the answers FOLDER/NAME.forward and NAME.sample, and writes what the
client makes of them into FOLDER/answers.json.
"""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from google.protobuf import descriptor_pb2, json_format
from tinker import types
from tinker.lib.chunked_fwdbwd_helpers import REDUCE_MAP, combine_fwd_bwd_output_results
from tinker.proto import response_conv
from tinker.proto import tinker_public_pb2 as public
from tinker.resources.training import AsyncTrainingResource
from tinker.types.forward_backward_request import ForwardBackwardRequest

FOLDER = Path(sys.argv[1])


def described() -> dict:
    file = descriptor_pb2.FileDescriptorProto()
    public.DESCRIPTOR.CopyToProto(file)
    return {"file": json_format.MessageToDict(file), "reductions": sorted(REDUCE_MAP)}


def posted(request: ForwardBackwardRequest, compress: bool, forward_only: bool) -> tuple[bytes, str | None]:
    """The body and the Content-Encoding that the SDK's own resource posts."""
    seen = []

    async def post(path, *, body, options, cast_to):
        seen.append((body, options["headers"].get("Content-Encoding")))

    verbs = dict.fromkeys(("get", "patch", "put", "delete", "get_api_list"))
    client = SimpleNamespace(_client_config=SimpleNamespace(proto_compress_fwdbwd=compress), post=post, **verbs)
    resource = AsyncTrainingResource(client)
    asyncio.run(resource.forward_backward(request=request, forward_only=forward_only))
    return seen[0]


def top_k() -> types.Datum:
    """Four positions with three targets: the second is empty, the third has a target of id 0 with a weight."""
    targets, weights = torch.zeros(20, 3, dtype=torch.long), torch.zeros(20, 3)
    targets[0], weights[0] = torch.tensor([5, 0, 7]), torch.tensor([0.5, 0.25, 0.25])
    targets[2], weights[2] = torch.tensor([0, 9, 4]), torch.tensor([0.75, 0.0, 0.25])
    data = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(20))),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    assert all(data.loss_fn_inputs[name].sparse_crow_indices is not None for name in ("target_tokens", "weights"))
    return data


def two_chunks() -> types.Datum:
    chunks = [types.EncodedTextChunk(tokens=[3, 1]), types.EncodedTextChunk(tokens=[2])]
    inputs = {"target_tokens": [1, 0, 8], "logprobs": [-1.5, -0.1, -2.0], "advantages": [0.0, -1.25, 3.0]}
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def dense_top_k() -> types.Datum:
    targets = torch.tensor([[1, 2], [3, 4]])
    return types.Datum(
        model_input=types.ModelInput.from_ints([7, 8]),
        loss_fn_inputs={"target_tokens": targets, "weights": torch.tensor([[0.5, -2.0], [1e-30, 0.0]])},
    )


# name: data, loss, its configuration, seq_id, compressed, forward_only
REQUESTS = {
    "dense": ([two_chunks()], "ppo", {"clip_low_threshold": 0.9, "mode": "a"}, 1, False, False),
    "zstd": ([two_chunks(), dense_top_k()], "cispo", None, 2**31 - 1, True, True),
    "sparse": ([top_k()], "cross_entropy", None, None, False, False),
}


def requests() -> dict:
    found = {}
    for name, (data, loss_fn, config, seq_id, compress, forward_only) in REQUESTS.items():
        inputs = types.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config)
        request = ForwardBackwardRequest(forward_backward_input=inputs, model_id="s:train:0", seq_id=seq_id)
        body, encoding = posted(request, compress, forward_only)
        (FOLDER / f"{name}.request").write_bytes(body)
        found[name] = {
            "encoding": encoding,
            "seq_id": seq_id,
            "loss_fn": loss_fn,
            "config": config or {},
            "forward_only": forward_only,
            "data": [
                {
                    "tokens": datum.model_input.to_ints(),
                    "inputs": {key: [tensor.dtype, tensor.tolist()] for key, tensor in datum.loss_fn_inputs.items()},
                }
                for datum in data
            ],
        }
    return found


def forward_answer(body: bytes) -> dict:
    output = response_conv.deserialize_proto_response(body, types.ForwardBackwardOutput)
    output = combine_fwd_bwd_output_results([output])
    rows = [datum["logprobs"] for datum in output.loss_fn_outputs]
    return {
        "metrics": output.metrics,
        "shapes": [row.shape for row in rows],
        "dtypes": [row.dtype for row in rows],
        "logprobs": [row.tolist() for row in rows],
    }


def sample_answer(body: bytes) -> dict:
    response = response_conv.deserialize_proto_response(body, types.SampleResponse)
    return {
        "sequences": [
            {
                "tokens": sequence.tokens,
                "logprobs": sequence.logprobs,
                "stop_reason": sequence.stop_reason,
                "topk": sequence.topk_logprobs,
            }
            for sequence in response.sequences
        ],
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
    }


def main() -> None:
    answers = {path.name: forward_answer(path.read_bytes()) for path in FOLDER.glob("*.forward")}
    answers |= {path.name: sample_answer(path.read_bytes()) for path in FOLDER.glob("*.sample")}
    for name, content in (("descriptors", described()), ("requests", requests()), ("answers", answers)):
        (FOLDER / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


main()
