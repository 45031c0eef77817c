"""Model folders, data and configurations that bring a program along: nothing of it runs. (Of checkpoints:
tests/checkpoints.)

What is refused is refused in one line; what is not read at all is left alone.
"""

import json
import pickle
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from support.faults.hostile import Payload, code, saved
from support.models import families
from tokenizers import Regex, Tokenizer, decoders, normalizers

from isoloss.engine.config.schema import Config, DataConfig
from isoloss.engine.data import rows
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import load_dataset
from isoloss.engine.data.files import opening
from isoloss.engine.data.token_cache import checksum
from isoloss.engine.rl import user_functions
from isoloss.engine.rl.backends.local import transformers_backend
from isoloss.engine.rl.prompts import load_prompts
from isoloss.models.families import deepseek_v3
from isoloss.models.families.registry import read_architecture
from isoloss.models.weights.hf_checkpoint import HFReader
from isoloss.models.weights.side_files import SideFiles, declared_stops
from isoloss.parallel import UserError
from isoloss.recipes import launch
from isoloss.tools.migrate import reading

TINY = Path(str(files("isoloss.recipes") / "assets" / "tiny"))
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture
def mark(tmp_path) -> Path:
    """What a program makes that runs."""
    return tmp_path / "mark"


@pytest.fixture
def model(tmp_path) -> Path:
    """config.json and tokenizer, to be written to."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    return folder


def change(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Whoever is asked says yes, and it is noted down."""
    questions = []
    monkeypatch.setattr("builtins.input", lambda text="": questions.append(text) or "y")
    return questions


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "training_args.bin"))
def test_pickled_weights_are_not_read(name, model, mark):
    (model / name).write_bytes(saved(Payload(mark)))
    with pytest.raises(UserError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        HFReader(model)
    save_file({"a": torch.ones(2)}, model / "model.safetensors")
    assert HFReader(model).names == ("a",)
    SideFiles.of(model).write(model / "copy", read_architecture(model))
    assert not (model / "copy" / name).exists() and not mark.exists()


def test_a_pickle_that_is_called_safetensors(model, mark):
    (model / "model.safetensors").write_bytes(saved(Payload(mark)))
    with pytest.raises(UserError, match=r"model.safetensors is not a safetensors file, or cut short"):
        HFReader(model)
    assert not mark.exists()


@pytest.mark.parametrize("file", ("../other/x.safetensors", "{here}/other/x.safetensors", "..", "", 7, ["x"]))
def test_an_index_names_files_of_its_folder(file, model, tmp_path):
    (tmp_path / "other").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "other/x.safetensors")
    file = file.format(here=tmp_path) if isinstance(file, str) else file
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UserError, match=r"index.json names .*, which is no file of its folder"):
        HFReader(model)


def test_a_shard_may_be_a_link(model, tmp_path):
    """In the cache of the Hugging Face hub every file is one."""
    save_file({"a": torch.ones(2)}, tmp_path / "blob")
    (model / "model-1.safetensors").symlink_to(tmp_path / "blob")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert HFReader(model).shape("a") == (2,)


# ---- code beside a model ---------------------------------------------------------------------------------------------


def plant(folder: Path, mark: Path) -> None:
    """A module that makes the mark where it is imported, with every class that a file could name."""
    classes = "".join(f"\nclass {name}: pass" for name in ("Own", "OwnConfig", "OwnTokenizer", "OwnModel"))
    (folder / "own.py").write_text(code(mark) + classes)


AUTO_MAP = {name: f"own.Own{name.removeprefix('Auto')}" for name in ("AutoConfig", "AutoModel", "AutoTokenizer")}
AUTO_MAP |= {"AutoModelForCausalLM": "own.OwnModel", "AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}


@pytest.mark.parametrize("model_type", ("qwen3", "own"))
def test_code_for_a_model_is_not_imported(model_type, model, mark, asked):
    """isoloss takes such a folder only of families that are published in this way; transformers, which generates, takes
    its own code for it."""
    arch = read_architecture(model)
    plant(model, mark)
    change(model / "config.json", auto_map=AUTO_MAP, model_type=model_type)
    with pytest.raises(UserError, match=r"auto_map=.* is not supported for qwen3"):
        read_architecture(model)
    built = transformers_backend.build(model, arch, torch.float32, torch.device("cpu"))
    assert type(built).__module__.startswith("transformers.")
    assert not mark.exists() and not asked


@pytest.mark.parametrize("field", ("_target_", "trust_remote_code", "code"))
def test_a_field_that_would_be_a_program_elsewhere(field, model, mark):
    plant(model, mark)
    change(model / "config.json", **{field: "own.Own"})
    with pytest.raises(UserError, match=rf"{field}='own.Own' is a field that the qwen3 family does not know"):
        read_architecture(model)
    assert not mark.exists()


def test_a_kernel_that_a_file_names_is_not_fetched(model, asked):
    change(model / "config.json", attn_implementation="kernels-community/own", _attn_implementation="own/own")
    built = transformers_backend.build(model, read_architecture(model), torch.float32, torch.device("cpu"))
    assert built.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("with_config", (False, True))
def test_code_for_a_tokenizer_is_not_imported(with_config, model, mark, asked):
    """Nor is anybody asked whether it should be."""
    plant(model, mark)
    change(model / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="OwnTokenizer", trust_remote_code=True)
    if with_config:
        change(model / "config.json", auto_map=AUTO_MAP, model_type="own", tokenizer_class="OwnTokenizer")
    else:
        (model / "config.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer: .* does not load \(ValueError: .*custom code") as error:
        load_tokenizer(str(model), 2048)
    assert len(str(error.value).splitlines()) == 1
    assert not mark.exists() and not asked


@pytest.mark.parametrize("name", ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "spiece.model"))
def test_a_tokenizer_that_is_a_pickle(name, model, mark):
    (model / "tokenizer.json").unlink()
    (model / name).write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(UserError, match=r"^tokenizer: "):
        load_tokenizer(str(model), 2048)
    assert not mark.exists()


# ---- templates -------------------------------------------------------------------------------------------------------

REACH = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ lipsum.__globals__['os'].system(COMMAND) }}",
    "{{ cycler.__init__.__globals__.os.system(COMMAND) }}",
    "{{ joiner.__init__.__globals__['__builtins__']['exec'](CODE) }}",
    "{{ namespace.__init__.__globals__.os.system(COMMAND) }}",
    "{{ raise_exception.__globals__['__builtins__']['exec'](CODE) }}",
    "{{ strftime_now.__globals__['__builtins__']['exec'](CODE) }}",
    "{{ messages.__class__.__base__.__subclasses__() | map(attribute='__init__') | list }}",
    "{{ (messages | attr('__class__')).__name__.x }}",
    "{{ messages[0]['content'].format.__self__.__class__ }}{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ self.__init__.__globals__.os.system(COMMAND) }}",
    "{{ self._TemplateReference__context.eval_ctx.environment.__class__.x }}",
    "{% import 'os' as os %}{{ os.system(COMMAND) }}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(messages[0]) }}",
    "{{ messages.clear() }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x(CODE) }}{% endfor %}",
    "{{ __import__('os').system(COMMAND) }}",
    "{{ open(MARK, 'w') }}",
)


@pytest.mark.parametrize("kind", ("sft", "rl"))
@pytest.mark.parametrize("template", REACH)
def test_a_template_reaches_nothing(template, kind, model, mark, tmp_path):
    """It is refused for the row that was to be rendered, as a template that fails in another way is."""
    for name, value in (("COMMAND", f"touch {mark}"), ("CODE", code(mark)), ("MARK", str(mark))):
        template = template.replace(name, repr(value))
    (model / "chat_template.jinja").write_text(template)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": CHAT, "prompt": CHAT[:1]}) + "\n")
    data = DataConfig(train=(str(path),))
    with pytest.raises(UserError, match=r"rows.jsonl:1: the chat template refuses these messages") as error:
        if kind == "sft":
            load_dataset(data, "train", str(model), vocab_size=2048, cache_dir=tmp_path / "cache")
        else:
            load_prompts(data, "train", load_tokenizer(str(model), 2048), max_prompt_tokens=64)
    assert len(str(error.value).splitlines()) == 1
    assert not mark.exists()


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_cached_rows_that_are_pickles(model, mark, tmp_path):
    """An array of objects is tokenized again, whatever checksum stands beside it."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "One, two, three."}\n')
    data = DataConfig(train=(str(path),))
    options = {"vocab_size": 2048, "cache_dir": tmp_path / "cache"}
    first = load_dataset(data, "train", str(model), **options)
    tokens = np.array(first.tokens)
    (folder,) = (tmp_path / "cache").iterdir()
    meta = json.loads((folder / "meta.json").read_text())
    for name in meta["crc32"]:
        (folder / f"{name}.npy").unlink()  # it is mapped
        np.save(folder / f"{name}.npy", np.array([Payload(mark)], dtype=object), allow_pickle=True)
        meta["crc32"][name] = checksum(folder / f"{name}.npy")
    (folder / "meta.json").write_text(json.dumps(meta))
    again = load_dataset(data, "train", str(model), **options)
    assert again.fingerprint == first.fingerprint and np.array_equal(again.tokens, tokens)
    assert not mark.exists()


def test_a_type_of_parquet_that_is_a_pickle(mark, tmp_path):
    """pyarrow once unpickled what called itself a type of Python's."""
    field = pa.field(
        "text",
        pa.string(),
        metadata={
            "ARROW:extension:name": "arrow.py_extension_type",
            "ARROW:extension:metadata": pickle.dumps(Payload(mark)),
        },
    )
    table = pa.table([pa.array(["One, two, three."])], schema=pa.schema([field]))
    pq.write_table(table, tmp_path / "rows.parquet")
    data = DataConfig(train=(str(tmp_path / "rows.parquet"),))
    assert len(load_dataset(data, "train", str(TINY), vocab_size=2048, cache_dir=tmp_path / "cache")) == 1
    assert not mark.exists()


# ---- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    (
        "_target_=os.system",
        "model._target_=os.system",
        "+model._target_=os.system",
        "hydra.launcher._target_=os.system",
        "hydra/launcher=own",
        "hydra.searchpath=[/tmp]",
        "preset=../../../../tmp/own",
        "model={_target_: os.system, command: x}",
        "output_dir=${python:1}",
        "output_dir=${oc.create:{_target_: os.system}}",
        "train.steps=!!python/object/apply:os.system [x]",
    ),
)
def test_no_override_names_what_is_to_run(override, capsys, monkeypatch):
    monkeypatch.setattr(launch, "run", None)  # nothing starts
    assert launch.main("sft", ["model.path=m", "data.train=[a.jsonl]", override]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("isoloss: error: ")


def test_a_mapping_is_a_mapping(capsys):
    """What would be a call elsewhere is a name and a value for the chat template, which has no such variable."""
    argv = ["model.path=m", "data.train=[a.jsonl]", "data.template_kwargs={_target_: os.system, command: x}"]
    config, _, _ = launch.compose_config("sft", Config, argv)
    assert config.data.template_kwargs == {"_target_": "os.system", "command": "x"}


@pytest.mark.parametrize("tag", ("apply:builtins.exec", "new:os.system", "name:os.system", "module:os"))
def test_yaml_that_names_python(tag, mark, tmp_path):
    """Of another trainer, to be translated."""
    path = tmp_path / "config.yaml"
    kind = f"object/{tag}" if tag.startswith(("apply", "new")) else tag
    path.write_text(f"trainer: !!python/{kind} [{code(mark)!r}]\n")
    with pytest.raises(UserError, match=r"config.yaml: cannot be read: could not determine a constructor for the tag"):
        reading.mapping(path)
    assert not mark.exists()


# ---- reward functions ------------------------------------------------------------------------------------------------


def test_a_reward_file_is_run_alone(mark, tmp_path, monkeypatch):
    """The file that was named is a program of the user's. What lies beside it is not: no module of its folder is
    found, nor takes the place of a library, and the search path stays what it was."""
    for name in ("json", "beside", "__init__", "sitecustomize", "conftest"):
        (tmp_path / f"{name}.py").write_text(code(mark))
    (tmp_path / "rewards.py").write_text("import json\ndef one(completion): return float(json.loads('1'))\n")
    (tmp_path / "greedy.py").write_text("import beside\ndef one(completion): return 1.0\n")
    before = list(sys.path)
    assert user_functions.load(f"{tmp_path}/rewards.py:one")("x") == 1.0
    with pytest.raises(user_functions.NotFoundError, match="beside"):
        user_functions.load(f"{tmp_path}/greedy.py:one")
    assert sys.path == before and not mark.exists()


# ---- files that would take all time or memory ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    (
        ("num_hidden_layers", 1025), ("num_hidden_layers", 10**12), ("vocab_size", 2**31),
        ("intermediate_size", 10**40),
    ),
)  # fmt: skip
def test_sizes_that_no_model_has(field, value, model):
    change(model / "config.json", **{field: value})
    with pytest.raises(UserError, match=rf"config.json: {field}={value} must be at most \d+, more than any model has"):
        read_architecture(model)


@pytest.mark.parametrize(("field", "most"), (("n_routed_experts", 8192), ("num_nextn_predict_layers", 1024)))
def test_layers_and_experts_that_no_model_has(field, most, model):
    config = families.published("deepseek-v3") | {field: most + 1}
    with pytest.raises(UserError, match=rf"{field}={most + 1} must be at most {most}, more than any model has"):
        deepseek_v3.architecture(config)


@pytest.mark.parametrize(
    ("text", "says"),
    (
        ("[" * 100_000, "is not valid JSON"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "the key 'a' stands twice"),
        ('{"weight_map": 7}', "is not a safetensors index"),
    ),
    ids=("deep", "twice", "no map"),
)
def test_an_index_that_readers_take_in_different_ways(text, says, model):
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=rf"index.json .*{says}"):
        HFReader(model)


@pytest.mark.parametrize("name", ("config.json", "generation_config.json", "model.safetensors.index.json"))
def test_json_of_any_size_is_not_read(name, model):
    """A file with a hole, of which the disk holds nothing."""
    with open(model / name, "ab") as file:
        file.truncate((256 << 20) + 1)
    read = {"config.json": read_architecture, "generation_config.json": declared_stops}.get(name, HFReader)
    with pytest.raises(UserError, match=rf"{name} has 268,435,457 bytes, more than the 268,435,456 that are read"):
        read(model)


@pytest.mark.parametrize("text", ("plain", "dictionary", "nested"))
def test_parquet_of_a_few_bytes_that_holds_too_much(text, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "FREE_BYTES", 1 << 20)
    same = pa.DictionaryArray.from_arrays(pa.array([0] * 640, pa.int32()), pa.array(["a" * 100_000]))
    column = {
        "plain": same.dictionary_decode(),
        "dictionary": same,
        "nested": pa.StructArray.from_arrays([same.dictionary_decode()], ["of"]),
    }[text]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": column}), path, row_group_size=64)
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(opening, "MAX_GROWTH", 100)
    with pytest.raises(UserError, match=r"^data.train: .*rows.parquet: its rows up to 64 hold more than 100 times"):
        next(rows.unread_rows([str(path)], "data.train"))
    monkeypatch.setattr(opening, "FREE_BYTES", 1 << 30)
    assert sum(1 for _ in rows.unread_rows([str(path)], "data.train")) == 640


@pytest.mark.parametrize(
    ("name", "part"),
    (
        ("normalizer", normalizers.Replace("a", "a" * 101)),
        ("normalizer", normalizers.Sequence([normalizers.NFC(), *[normalizers.Replace("a", "a" * 11)] * 2])),
        ("normalizer", normalizers.Sequence([normalizers.Sequence([normalizers.Replace(Regex("a+"), "b" * 1000)])])),
        ("normalizer", normalizers.Prepend("a" * 1000)),
        ("decoder", decoders.Sequence([decoders.Replace("a", "a" * 101), decoders.ByteFallback()])),
    ),
)
def test_a_tokenizer_that_lengthens_texts_without_measure(name, part, tmp_path):
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / each, tmp_path)
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    setattr(own, name, part)
    own.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=rf"^tokenizer: .*: its {name} can make a text 1.* times as long"):
        load_tokenizer(str(tmp_path), 2048)
