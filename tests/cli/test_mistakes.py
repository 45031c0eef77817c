"""A mistake of the user ends with status 2 and one line that names the key or row, the value and the mend."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.runs import warm
from support.runs.runs import typed

from isoloss.engine.config.schema import Config
from isoloss.recipes import launch


@dataclass(frozen=True)
class Mistake:
    """Overrides on top of a run that works, and what the line must say. `{inputs}` stands for the folder of inputs."""

    name: str
    overrides: tuple[str, ...]
    says: tuple[str, ...]
    world: int = 1


def told(name: str, overrides: str | tuple[str, ...], *says: str, world: int = 1) -> Mistake:
    return Mistake(name, (overrides,) if isinstance(overrides, str) else overrides, says, world)


CONFIGURATION = (
    told("profile without a folder", "train.profile=3", "train.profile='3'", "5:profile"),
    told("profile of no step", "train.profile='0:here'", "train.profile='0:here'", "from 1"),
    told("profile of a step too many", "train.profile=99:here", "train.profile='99:here'", "one of the run's"),
    told("profile into a file", "train.profile=1:{inputs}/rows.jsonl", "train.profile={inputs}/rows", "is a file"),
    told("misspelt key", "optim.lrr=1e-3", "'optim.lrr'", "'optim.lr'"),
    told("misspelt key of another group", "train.lr=1e-3", "'train.lr'", "did you mean 'optim.lr'"),
    told("misspelt group", "optimizer.lr=1e-3", "'optimizer.lr'", "did you mean 'optim.lr'"),
    told("group instead of a key", "train=5", "'train'", "train.steps"),
    told("added key", "+train.foo=1", "'+train.foo'"),
    told("deleted key", "~train.steps", "~train.steps", "key=value"),
    told("wrong type: int", "train.steps=many", "train.steps='many'", "an integer"),
    told("wrong type: fraction", "parallel.tp=1.5", "parallel.tp=1.5", "an integer"),
    told("wrong type: bool", "checkpoint.resume=maybe", "checkpoint.resume='maybe'", "true or false"),
    told("wrong type: float", "optim.lr=fast", "optim.lr='fast'", "number"),
    told("wrong length", "optim.betas=[0.9]", "optim.betas=[0.9]", "list of 2"),
    told("a scalar for a pair", "optim.betas=0.9", "optim.betas=0.9", "list of 2"),
    told("not among the choices", "train.precision=fp16", "train.precision='fp16'", "fp32", "bf16", "fp64"),
    told("not among the choices: overlong", "data.overlong=cut", "data.overlong='cut'", "truncate"),
    told("not among the choices: aggregation", "loss.aggregation=mean", "loss.aggregation='mean'", "token-mean"),
    told("unknown preset", "preset=big", "preset='big'", "tiny"),
    told("no equals sign", "train.steps", "'train.steps'", "key=value"),
    told("null for what is required", "model.path=null", "model.path=None"),
    told("empty for what is required", "model.path=", "model.path=''"),
    told("null for a list", "data.train=null", "data.train=[]", "at least one"),
    told("the name that others use", "optim.learning_rate=1e-4", "'optim.learning_rate'", "'optim.lr'"),
    told("number for a mapping", "data.template_kwargs=5", "data.template_kwargs=5", "mapping"),
    told("misspelt mapping", "data.template_kwarg.a=5", "'data.template_kwarg.a'", "'data.template_kwargs'"),
    told("no data", "data.train=[]", "data.train=[]", "at least one"),
    told("list without brackets", "data.train=a.jsonl,b.jsonl", "data.train=a.jsonl,b.jsonl", "[a.jsonl,b.jsonl]"),
    told("unbalanced quote", "output_dir='out", "output_dir='out", "quote"),
    told("unreadable value", "output_dir=a(b", "output_dir=a(b", "quote"),
    told("missing interpolation", "output_dir=${nothing}", "output_dir", "nothing"),
    told("negative steps", "train.steps=-1", "train.steps=-1", "at least 1"),
    told("no steps", "train.steps=0", "train.steps=0", "at least 1"),
    told("negative epochs", "train.epochs=-2", "train.epochs=-2", "at least 1"),
    told("negative seed", "train.seed=-1", "train.seed=-1", "not be negative"),
    told("negative learning rate", "optim.lr=-1e-3", "optim.lr=-0.001", "negative"),
    told("no number for a learning rate", "optim.lr=nan", "optim.lr=nan", "finite"),
    told("endless learning rate", "optim.lr=inf", "optim.lr=inf", "finite"),
    told("minimum above the learning rate", "optim.min_lr=1", "optim.min_lr=1.0", "optim.lr"),
    told("negative weight decay", "optim.weight_decay=-0.1", "optim.weight_decay=-0.1", "negative"),
    told("negative eps", "optim.eps=-1e-8", "optim.eps=-1e-08", "positive"),
    told("negative clip", "optim.clip=-1", "optim.clip=-1.0", "0 switches"),
    told("beta of 1", "optim.betas=[0.9,1.0]", "optim.betas=(0.9, 1.0)", "[0, 1)"),
    told("negative warm-up", "optim.warmup_steps=-1", "optim.warmup_steps=-1", "negative"),
    told("nothing to keep", "checkpoint.keep=0", "checkpoint.keep=0", "at least 1"),
    told("negative interval", "checkpoint.every=-5", "checkpoint.every=-5", "negative"),
    told("no sequences in a step", "batch.global_size=0", "batch.global_size=0", "at least 1"),
    told("norm_length without its mode", "loss.norm_length=64", "loss.norm_length=64", "seq-mean-token-sum-norm"),
    told(
        "mode without norm_length", "loss.aggregation=seq-mean-token-sum-norm", "loss.norm_length=None", "norm"
    ),
    told(
        "fp64 with the distributed optimizer",
        ("train.precision=fp64", "parallel.distributed_optimizer=true"),
        "parallel.distributed_optimizer=true",
        "train.precision=fp64",
    ),
)  # fmt: skip

LAYOUT = (
    told("tp of 0", "parallel.tp=0", "parallel.tp=0", "at least 1"),
    told("tp does not divide the heads", "parallel.tp=3", "parallel.tp=3", "4 attention heads", "[1, 2, 4]", world=3),
    told("ulysses does not divide the heads", "parallel.ulysses=3", "parallel.ulysses=3", "[1, 2, 4]", world=3),
    told("more stages than layers", "parallel.pp=5", "parallel.pp=5", "4 layers", world=5),
    told("more stages than layers: vpp", ("parallel.pp=2", "parallel.vpp=3"), "vpp=3", "4 layers", world=2),
    told("vpp without pp", "parallel.vpp=2", "parallel.vpp=2", "parallel.pp"),
    told("world of no multiple", "parallel.tp=2", "world size 3", "tp 2", "start a multiple", world=3),
    told("world too small", "parallel.tp=2", "the layout tp2 needs 2 ranks", "torchrun --nproc_per_node 2 -m"),
    told("expert parallelism", "parallel.ep=2", "parallel.ep=2", "set it to 1", world=2),
    told("expert tensor parallelism", "parallel.etp=2", "parallel.etp=2", "set it to 1", world=2),
    told("sequence parallelism with tp 1", "parallel.sequence_parallel=true", "sequence_parallel=true", "parallel.tp"),
)  # fmt: skip

MODEL_AND_FILES = (
    told("missing model folder", "model.path=nowhere", "model.path=nowhere", "config.json"),
    told("name of a model on the hub", "model.path=Qwen/Qwen3-8B", "=Qwen/Qwen3-8B", "hf download Qwen/Qwen3-8B"),
    told("output where nothing can be", "output_dir=/proc/x/y", "output_dir=/proc/x/y cannot be written", "choose"),
    told("cache where nothing can be", "data.cache_dir=/proc/x", "data.cache_dir=/proc/x cannot be written"),
    told("profile where nothing can be", "train.profile=1:/proc/x", "train.profile=/proc/x cannot be written"),
    told("missing config.json", "model.path={inputs}", "model.path={inputs}", "no config.json"),
    told("missing weights", "model.from_scratch=false", "{inputs}/model", "safetensors"),
    told("missing tokenizer folder", "model.tokenizer=nowhere", "tokenizer", "nowhere"),
    told("folder without a tokenizer", "model.tokenizer={inputs}", "tokenizer", "{inputs}", "tokenizer.json"),
    told("missing data file", "data.train={inputs}/row.jsonl", "data.train", "did you mean {inputs}/rows.jsonl"),
    told("missing evaluation file", "data.eval={inputs}/row.jsonl", "data.eval", "did you mean {inputs}/rows.jsonl"),
    told("folder for a file", "data.train={inputs}", "data.train", "{inputs}", "folder"),
    told("kind of file", "data.train={inputs}/model/chat_template.jinja", "data.train", "jinja", ".jsonl"),
    told("positions", "data.max_length=257", "=257", "max_position_embeddings=256"),
    told("row over data.max_length", "data.max_length=30", "rows.jsonl:2", "data.max_length=30", "data.overlong"),
    told("every row dropped", ("data.max_length=8", "data.overlong=drop"), "12 rows", "data.max_length=8"),
    told(
        "nothing left of a row", ("data.max_length=8", "data.overlong=truncate"), "rows.jsonl:1", "data.max_length=8"
    ),
    told("variable of no template", "data.template_kwargs.mood=glad", "data.template_kwargs.mood", "not read"),
    told("output is a file", "output_dir={inputs}/rows.jsonl", "output_dir={inputs}/rows.jsonl", "file"),
    told("output below a file", "output_dir={inputs}/rows.jsonl/run", "output_dir={inputs}/rows.jsonl/run"),
    told("cache below a file", "data.cache_dir={inputs}/rows.jsonl/c", "data.cache_dir={inputs}/rows.jsonl/c"),
)  # fmt: skip

GOOD_ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
# (name, content of the file after one good row, what the line says besides file and line number 2)
ROWS = (
    ("malformed JSON", '{"messages": [', ("not JSON", "column")),
    ("not an object", "[1, 2]", ("JSON object", "list [1, 2]")),
    ("unknown kind", '{"sum": "a", "total": "b"}', ("sum, total", "`messages`")),
    ("messages of the wrong type", '{"messages": "hello"}', ("`messages`", "str 'hello'")),
    ("no assistant turn", '{"messages": [{"role": "user", "content": "a"}]}', ("no assistant turn", "roles: user")),
    ("mask of zeros", '{"prompt": "a", "completion": ""}', ("`completion`", "target")),
    ("one token of text", '{"text": ""}', ("`text`", "target")),
)


def complain(capsys, argv: list[str]) -> str:
    """The one line that the recipe says about `argv`, without its prefix."""
    capsys.readouterr()
    status = launch.main("sft", argv)
    out, err = capsys.readouterr()
    assert status == 2, err
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("isoloss: error: "), err
    assert out == ""
    return lines[0].removeprefix("isoloss: error: ")


@pytest.fixture
def one_node(monkeypatch, tmp_path):
    """Pretends to be rank 0 of a world of `size` ranks, with a place of its own for the mark that one rank spoke."""

    def pretend(size: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(size))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    return pretend


@pytest.mark.parametrize("mistake", (*CONFIGURATION, *LAYOUT, *MODEL_AND_FILES), ids=lambda m: m.name)
def test_overrides(mistake, inputs, arguments, one_node, capsys):
    one_node(mistake.world)
    line = complain(capsys, [*arguments, *(text.replace("{inputs}", str(inputs)) for text in mistake.overrides)])
    for part in mistake.says:
        assert part.replace("{inputs}", str(inputs)) in line
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(("row", "says"), [case[1:] for case in ROWS], ids=[case[0] for case in ROWS])
def test_rows(row, says, tmp_path, arguments, capsys):
    file = tmp_path / "bad.jsonl"
    file.write_text(f"{GOOD_ROW}\n{row}\n")
    line = complain(capsys, [*arguments, f"data.train={file}"])
    assert line.startswith(f"{file}:2: ")
    assert all(part in line for part in says), line
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("content", ("", "\n\n"), ids=("no bytes", "blank lines"))
def test_empty_data_set(content, tmp_path, arguments, capsys):
    file = tmp_path / "empty.jsonl"
    file.write_text(content)
    line = complain(capsys, [*arguments, f"data.train={file}"])
    assert "data.train" in line and str(file) in line and "at least one row" in line
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    (
        (
            {"architectures": ["Qwen3ForCausalLMM"]},
            ("architectures=Qwen3ForCausalLMM", "did you mean Qwen3ForCausalLM"),
        ),
        ({"vocab_size": 2000}, ("token ids up to", "vocab_size is 2000")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"num_hidden_layers": "four"}, ("num_hidden_layers", "four")),
    ),
    ids=("unknown architecture", "tokenizer ids exceed the vocabulary", "activation", "wrong type"),
)
def test_config_json(change, says, inputs, tmp_path, arguments, capsys):
    model = tmp_path / "model"
    shutil.copytree(inputs / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    line = complain(capsys, [*arguments, f"model.path={model}"])
    assert str(model) in line
    assert all(part in line for part in says), line
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("text", ("{", "[]"))
def test_config_json_is_not_one(text, inputs, tmp_path, arguments, capsys):
    model = tmp_path / "model"
    shutil.copytree(inputs / "model", model)
    (model / "config.json").write_text(text)
    assert f"{model}/config.json" in complain(capsys, [*arguments, f"model.path={model}"])


@pytest.mark.parametrize("overlong", ("drop", "truncate"))
def test_overlong_rows_can_be_dropped_or_cut(overlong, arguments, capsys):
    """What the line about overlong rows proposes works: 12 rows of 31 tokens and more, a limit amid their lengths."""
    assert launch.main("sft", [*arguments, "data.max_length=34", f"data.overlong={overlong}"]) == 0
    steps = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [step["applied"] for step in steps] == [1, 1]
    assert all(step["total_tokens"] <= 4 * 34 for step in steps)


def test_bad_rows_can_be_left_out(inputs, tmp_path, arguments, capsys):
    """As data.max_rejects says: the run ends well, and tells where they are named; the next one has none to tell of."""
    good = (inputs / "rows.jsonl").read_text()
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    train.write_text("[1, 2]\n" + good + '{"text":')
    held_out.write_text(good + '{"text": ""}')
    argv = [*arguments, f"data.train={train}", f"data.eval={held_out}", "data.max_rejects=2"]
    assert launch.main("sft", argv) == 0
    assert "data: 3 bad rows left out, see out/rejects.jsonl\n" in capsys.readouterr().out
    rejects = [json.loads(line) for line in Path("out/rejects.jsonl").read_text().splitlines()]
    assert [(each["split"], each["place"]) for each in rejects] == [
        ("data.train", f"{train}:1"), ("data.train", f"{train}:14"), ("data.eval", f"{held_out}:13")
    ]  # fmt: skip
    assert "must be a JSON object" in rejects[0]["reason"]
    mended = [f"data.train={inputs}/rows.jsonl", "data.eval=[]", "checkpoint.resume=true", "train.steps=3"]
    assert launch.main("sft", [*argv, *mended]) == 0  # the same rows: the same run
    assert "left out" not in capsys.readouterr().out and not Path("out/rejects.jsonl").exists()


def test_more_bad_rows_than_may_be_left_out(inputs, tmp_path, arguments, capsys):
    train = tmp_path / "train.jsonl"
    train.write_text("[1, 2]\n" + (inputs / "rows.jsonl").read_text() + '{"text":')
    line = complain(capsys, [*arguments, f"data.train={train}", "data.max_rejects=1"])
    assert line.startswith("data.train: 2 bad rows are more than data.max_rejects=1") and f"{train}:1: " in line
    assert list(Path.cwd().iterdir()) == []


# ---- a folder with a run in it --------------------------------------------------------------------------------------


def everything(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("overrides", "says"),
    (
        ((), ("output_dir=out holds a run", "checkpoint.resume=true")),
        (("checkpoint.resume=true", "train.seed=7"), ("train.seed=7", "differs from the 0", "step_00000002")),
        (("checkpoint.resume=true", "batch.global_size=3"), ("batch.global_size=3", "differs from the 4")),
        (("checkpoint.resume=true", "train.precision=bf16"), ("train.precision='bf16'", "differs from the 'fp32'")),
    ),
    ids=("no resume", "another seed", "another batch", "another precision"),
)
def test_the_folder_holds_another_run(overrides, says, arguments, capsys):
    assert launch.main("sft", arguments) == 0
    before = everything("out")
    line = complain(capsys, [*arguments, *overrides])
    assert all(part in line for part in says), line
    assert everything("out") == before


def test_no_complete_checkpoint(arguments, capsys):
    assert launch.main("sft", arguments) == 0
    Path("out/checkpoints/step_00000002/isoloss.json").unlink()
    before = everything("out")
    line = complain(capsys, [*arguments, "checkpoint.resume=true"])
    assert "step_00000002/isoloss.json is missing; the checkpoint is not complete" in line and "delete all" in line
    assert everything("out") == before


# ---- through torchrun -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "override", "says"),
    (
        (subprocess.run, "optim.lrr=1", "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        (warm.run, "parallel.tp=4", "world size 2 is not a multiple of tp 4"),
        (warm.run, "data.max_length=30", "rows.jsonl:2"),
    ),
    ids=("key", "layout", "row"),
)
def test_two_ranks_say_it_once(run, override, says, arguments, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = run(
        [*command, "-m", "isoloss.recipes.sft", *typed(*arguments, override)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "exitcode  : 2" in done.stderr
    from_ranks = [line for line in done.stderr.splitlines() if line.startswith("isoloss: ")]
    assert len(from_ranks) == 1 and says in from_ranks[0], done.stderr
    assert "isoloss/" not in done.stderr.split("isoloss: error: ")[0]  # no traceback through our own code
    assert list(Path.cwd().iterdir()) == []


def test_a_model_of_ones_own_takes_nothing_from_the_demonstration(tmp_path):
    """Neither its random weights nor its schedule, precision or evaluation set, unless preset=tiny asks for them."""
    own, _, preset = launch.compose_config("sft", Config, [f"model.path={tmp_path}", "data.train=[rows.jsonl]"])
    assert preset == "plain" and not own.model.from_scratch and own.data.eval == ()
    assert own.optim == Config(own.model).optim and own.train == Config(own.model).train
    asked, _, preset = launch.compose_config("sft", Config, [f"model.path={tmp_path}", "preset=tiny"])
    assert preset == "tiny" and asked.model.from_scratch
    assert launch.compose_config("sft", Config, [])[2] == "tiny"
    assert launch.compose_config("sft", Config, ["data.train=[rows.jsonl]"])[2] == "tiny"
    alone, _, preset = launch.compose_config("sft", Config, [f"model.path={tmp_path}"])  # no rows are named
    assert preset == "plain" and not alone.model.from_scratch and alone.data.train == ()
