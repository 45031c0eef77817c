"""Messages of Tinker's API that travel as protobuf: those that the server reads or writes.

No .proto file is published. The field numbers were read from the descriptors of its SDK, and a test compares them with
the installed SDK's. Fields that are missing here are skipped when a message is read, as protobuf does with any field
that it does not know. The messages have a package and a pool of their own, so that they can live in one process with
the SDK's.
"""

from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "isoloss.serve"
ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
STOP, LENGTH = range(2)
UNSPECIFIED, FLOAT32, INT64, INT32, BFLOAT16 = range(5)


class Row(NamedTuple):
    """A field of a message.

    type: a scalar of protobuf, an enum or a message.
    label: "" (one value), "repeated", "optional" (presence is known), "map" (from strings), else the oneof's name.
    """

    name: str
    number: int
    type: str
    label: str = ""


MESSAGES = {
    # What the client sends.
    "ForwardBackwardRequest": (
        Row("model_id", 1, "string"),
        Row("seq_id", 2, "int32"),
        Row("data", 3, "Datum", "repeated"),
        Row("loss_fn", 4, "string"),
        Row("loss_fn_config", 5, "double", "map"),
        Row("forward_only", 6, "bool"),
        Row("loss_fn_config_v2", 7, "LossConfigValue", "map"),
    ),
    "LossConfigValue": (Row("number", 1, "double", "value"), Row("text", 2, "string", "value")),
    "Datum": (Row("model_input", 1, "Chunk", "repeated"), Row("loss_fn_inputs", 2, "Tensor", "map")),
    "Chunk": (
        Row("encoded_text", 1, "EncodedTextChunk", "chunk"),
        Row("image", 2, "ImageChunk", "chunk"),
        Row("dmel", 3, "DmelChunk", "chunk"),
    ),
    "EncodedTextChunk": (Row("tokens", 1, "bytes"),),
    "ImageChunk": (),  # refused, whatever they contain
    "DmelChunk": (),
    "Tensor": (
        Row("dense", 1, "bytes", "encoding"),
        Row("sparse_csr", 2, "SparseCsr", "encoding"),
        Row("dtype", 3, "DType"),
        Row("shape", 4, "int64", "repeated"),
    ),
    "SparseCsr": (Row("values", 1, "bytes"), Row("crow_indices", 2, "bytes"), Row("col_indices", 3, "bytes")),
    # What it gets.
    "ForwardBackwardOutput": (
        Row("loss_fn_output_type", 1, "string"),
        Row("loss_fn_outputs", 2, "ArrayRecord", "repeated"),
        Row("metrics", 3, "double", "map"),
    ),
    "ArrayRecord": (Row("fields", 2, "BatchedTensor", "map"), Row("num_datums", 3, "int64")),
    "BatchedTensor": (
        Row("data", 1, "bytes"),
        Row("offsets", 2, "bytes"),
        Row("dtype", 3, "DType"),
        Row("trailing_shape", 4, "int64", "repeated"),
    ),
    "SampleResponse": (
        Row("sequences", 1, "SampledSequence", "repeated"),
        Row("prompt_logprobs", 2, "bytes", "optional"),
        Row("topk_prompt_logprobs", 3, "TopkLogprobs", "optional"),
    ),
    "SampledSequence": (
        Row("stop_reason", 1, "StopReason"),
        Row("tokens", 2, "bytes"),
        Row("logprobs", 3, "bytes", "optional"),
        Row("topk_sampled_logprobs", 4, "TopkLogprobs", "optional"),
    ),
    "TopkLogprobs": (
        Row("token_ids", 1, "bytes"),
        Row("logprobs", 2, "bytes"),
        Row("k", 3, "uint32"),
        Row("length", 4, "uint32"),
    ),
}


def file_of_messages() -> descriptor_pb2.FileDescriptorProto:
    """Return ENUMS and MESSAGES as protobuf describes a .proto file."""
    file = descriptor_pb2.FileDescriptorProto(name="isoloss/serve.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        described = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            described.value.add(name=value, number=number)
    for name, rows in MESSAGES.items():
        message = file.message_type.add(name=name)
        # Protobuf wants the oneofs that stand for "optional" behind the others.
        for row in sorted(rows, key=lambda row: row.label == "optional"):
            _add(message, row)
    return file


def _add(message: descriptor_pb2.DescriptorProto, row: Row) -> None:
    field = message.field.add(
        name=row.name, number=row.number, label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
    )
    if row.label == "map":  # a repeated message of key and value, under a name that protobuf prescribes
        entry = message.nested_type.add(name=row.name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        _add(entry, Row("key", 1, "string"))
        _add(entry, Row("value", 2, row.type))
        _set_type(field, f"{message.name}.{entry.name}")
    else:
        _set_type(field, row.type)
    if row.label in ("repeated", "map"):
        field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    elif row.label:
        field.proto3_optional = row.label == "optional"
        oneof = f"_{row.name}" if field.proto3_optional else row.label
        known = [declared.name for declared in message.oneof_decl]
        if oneof not in known:
            message.oneof_decl.add(name=oneof)
            known.append(oneof)
        field.oneof_index = known.index(oneof)


def _set_type(field: descriptor_pb2.FieldDescriptorProto, name: str) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto.Type
    if f"TYPE_{name.upper()}" in dict(kinds.items()):
        field.type = kinds.Value(f"TYPE_{name.upper()}")
    else:
        field.type = kinds.Value("TYPE_ENUM" if name in ENUMS else "TYPE_MESSAGE")
        field.type_name = f".{PACKAGE}.{name}"


_POOL = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(file_of_messages().SerializeToString())


def new(name: str) -> Any:
    """Return an empty message of that name. Protobuf makes its classes at run time: no type checker knows them."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))()
