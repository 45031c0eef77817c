"""Protobuf messages of the Tinker API that the server reads and writes, made of a table of their fields.

No .proto file is published: numbers and types are those that the SDK sends (0.25 and later).
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "isoloss.tinker"
KINDS = {"double": 1, "float": 2, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13, "enum": 14}
# A field is "NAME TYPE"; + repeated, ? optional, @ONEOF a member of one, map a map from text.
MESSAGES: dict[str, dict[int, str]] = {
    "EncodedTextChunk": {1: "tokens bytes"},
    "ImageChunk": {1: "data bytes"},
    "DmelChunk": {1: "dmel bytes"},
    "Chunk": {1: "encoded_text EncodedTextChunk @chunk", 2: "image ImageChunk @chunk", 3: "dmel DmelChunk @chunk"},
    "SparseCsr": {1: "values bytes", 2: "crow_indices bytes", 3: "col_indices bytes"},
    "Tensor": {1: "dense bytes @encoding", 2: "sparse_csr SparseCsr @encoding", 3: "dtype enum", 4: "shape int64 +"},
    "Datum": {1: "model_input Chunk +", 2: "loss_fn_inputs Tensor map"},
    "LossConfigValue": {1: "number double @value", 2: "text string @value"},
    "ForwardBackwardRequest": {
        1: "model_id string",
        2: "seq_id int32",
        3: "data Datum +",
        4: "loss_fn string",
        5: "loss_fn_config float map",
        6: "forward_only bool",
        7: "loss_fn_config_v2 LossConfigValue map",
    },
    "BatchedTensor": {1: "data bytes", 2: "offsets bytes", 3: "dtype enum", 4: "trailing_shape int64 +"},
    "ArrayRecord": {1: "type_tag string", 2: "fields BatchedTensor map", 3: "num_datums int64"},
    "ForwardBackwardOutput": {
        1: "loss_fn_output_type string",
        2: "loss_fn_outputs ArrayRecord +",
        3: "metrics double map",
    },
    "TopkLogprobs": {1: "token_ids bytes", 2: "logprobs bytes", 3: "k uint32", 4: "length uint32"},
    "SampledSequence": {1: "stop_reason enum", 2: "tokens bytes", 3: "logprobs bytes ?"},
    "SampleResponse": {
        1: "sequences SampledSequence +",
        2: "prompt_logprobs bytes ?",
        3: "topk_prompt_logprobs TopkLogprobs ?",
    },
}


def message(name: str):
    """Return the class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="isoloss_tinker.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        of_message = file.message_type.add(name=name)
        for number, text in fields.items():
            field, kind, *rest = text.split()
            label = rest[0] if rest else ""
            if label == "map":
                entry = of_message.nested_type.add(name=_entry(field))
                entry.options.map_entry = True
                _typed(entry.field.add(name="key", number=1, label=1), "string")
                _typed(entry.field.add(name="value", number=2, label=1), kind)
                _typed(of_message.field.add(name=field, number=number, label=3), f"{name}.{_entry(field)}")
                continue
            made = of_message.field.add(name=field, number=number, label=3 if label == "+" else 1)
            _typed(made, kind)
            if label.startswith("@") or label == "?":
                oneof = label[1:] or f"_{field}"
                names = [each.name for each in of_message.oneof_decl]
                if oneof not in names:
                    of_message.oneof_decl.add(name=oneof)
                    names.append(oneof)
                made.oneof_index = names.index(oneof)
                made.proto3_optional = label == "?"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _typed(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    # An enum travels as an int32.
    if kind in KINDS:
        field.type = KINDS["int32" if kind == "enum" else kind]  # pyright: ignore[reportAttributeAccessIssue]
    else:
        field.type, field.type_name = field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"


def _entry(field: str) -> str:
    return "".join(part.capitalize() for part in field.split("_")) + "Entry"


_POOL = _pool()
