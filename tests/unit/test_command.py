"""The command `isoloss`: its subcommands, its version, and what completes them in a shell."""

import importlib
import importlib.util
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import isoloss
from isoloss.engine.config.parse import known_keys
from isoloss.engine.rl.config import RLConfig
from isoloss.parallel.runtime import program, versions
from isoloss.recipes import launch
from isoloss.tools.command import __main__ as command
from isoloss.tools.command import completion
from isoloss.tools.command.subcommands import BY_NAME, SUBCOMMANDS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = PROJECT["project"]["scripts"]
LINE = f"isoloss {versions.VERSION}, torch {version('torch')}, megatron-core {version('megatron-core')}, Python "


def test_the_table_is_that_of_the_console_scripts():
    scripts = {f"isoloss-{each.name}": f"{each.module}:main" for each in SUBCOMMANDS if each.has_script}
    assert {"isoloss": "isoloss.tools.command.__main__:main", **scripts} == SCRIPTS
    for each in SUBCOMMANDS:
        found = importlib.util.find_spec(each.module)
        assert found is not None and found.origin is not None
        assert "\ndef main(" in Path(found.origin).read_text()
        assert len(each.text) < 62 and (each.recipe is None) == (each.name not in launch.RECIPES)
    assert set(launch.RECIPES) <= BY_NAME.keys()


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_list(words, capsys):
    assert command.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.split() == [each.name, *each.text.split()] for line in lines) for each in SUBCOMMANDS)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("sfft", "there is no subcommand 'sfft'; did you mean 'sft'?"),
        ("reward_curve", "did you mean 'reward-curve'?"),
        ("xyzzy", "there are sft, grpo, dapo, audit,"),
        ("preset=tiny", "preset=tiny stands where a subcommand must: isoloss sft preset=tiny"),
        ("my.yaml", "my.yaml stands where a subcommand must: isoloss sft config=my.yaml"),
        ("--cfg", "there is no subcommand '--cfg'"),
    ],
)
def test_a_mistake_is_one_line(word, says, capsys):
    assert command.main([word, "more"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "isoloss", "sfft"], text=True, capture_output=True)
    assert done.returncode == 2 and "did you mean 'sft'?" in done.stderr


def test_a_subcommand_gets_its_words_and_gives_its_status(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(launch, "run", lambda *given: started.append((*given, sys.argv)))
    monkeypatch.setattr(sys, "argv", ["isoloss", "sft", "model.path=m", "data.train=x", "optim.lr=0.5"])
    assert command.main() == 0
    ((recipe, config, name, argv),) = started
    assert (recipe, name, config.optim.lr) == ("sft", "sft-plain", 0.5)
    assert argv == ["isoloss sft", "model.path=m", "data.train=x", "optim.lr=0.5"]  # what run.json records
    monkeypatch.setattr(sys, "argv", ["isoloss", "sft", "optim.lr=1", "optim.lr=2"])
    assert command.main() == 2 and "optim.lr is given twice" in capsys.readouterr().err


@pytest.mark.parametrize("each", [each for each in SUBCOMMANDS if each.name != "doctor"], ids=lambda each: each.name)
def test_version_and_help_of_a_subcommand(each, monkeypatch, capsys):
    for option, begins in (("--version", LINE), ("--help", f"usage: isoloss {each.name} ")):
        monkeypatch.setattr(sys, "argv", ["isoloss", each.name, option])
        try:
            status = command.main()
        except SystemExit as end:
            status = end.code
        assert status in (0, None) and capsys.readouterr().out.startswith(begins)
    monkeypatch.setattr(sys, "argv", ["/bin/isoloss-sft"])
    assert program.name_of("isoloss.recipes.sft") == "python -m isoloss.recipes.sft"


def test_one_version():
    assert isoloss.__version__ == versions.VERSION == versions.version_of("isoloss")
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert isoloss.__doc__ and versions.version_of("no-such-package") is None


def test_it_imports_nothing_that_takes_seconds():
    script = (
        "import sys\nfrom isoloss.tools.command.__main__ import main\nmain()\n"
        "print({'torch', 'hydra', 'yaml', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    for words in ([], ["--version"], ["completion", "answer", "isoloss", "sft", "optim.l"]):
        done = subprocess.run([sys.executable, "-c", script, *words], text=True, capture_output=True, check=True)
        assert done.stderr == "set()\n" and done.stdout


def answer(line: str) -> list[str]:
    return completion.answers(line.split(" "))


def test_what_a_word_may_become(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "my.yaml", "old.yml", ".hidden", "a b", "runs/x/config.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    assert answer("isoloss d") == ["dapo", "doctor"]
    assert answer("isoloss ") == [*BY_NAME, "--help", "--version"]
    assert answer("isoloss sft preset=8b_1") == ["preset=8b_128k_1node_h100", "preset=8b_128k_h100", "preset=8b_1gpu"]
    assert answer("isoloss grpo preset=s") == []  # of another recipe
    assert answer("isoloss sft optim.w") == ["optim.warmup_steps=", "optim.weight_decay="]
    assert answer("/venv/bin/isoloss-sft optim.w") == answer("isoloss sft optim.w")
    assert {f"{key}=" for key in known_keys(RLConfig)} <= set(answer("isoloss dapo "))
    assert not [each for each in answer("isoloss sft ") if each.startswith("rollout.")]
    assert answer("isoloss plan ") == ["sft", "grpo", "dapo", "--help", "--version"]
    assert answer("isoloss plan grpo --gpus 8 rollout.wav") == ["rollout.waves="]
    assert answer("isoloss prove algorithm.kl_es") == ["algorithm.kl_estimator="]
    assert answer("isoloss sft train.precision=f") == ["train.precision=fp32", "train.precision=fp64"]
    assert answer("isoloss sft model.from_scratch=") == ["model.from_scratch=true", "model.from_scratch=false"]
    assert answer("isoloss sft memory.recompute_modules=[mlp,la") == ["memory.recompute_modules=[mlp,layernorm"]
    assert answer("isoloss sft train.steps=") == answer("isoloss sft nothing=") == []
    assert answer("isoloss sft data.train=[x,t") == ["data.train=[x,train.jsonl"]
    assert answer("isoloss sft config=") == ["config=runs/", "config=my.yaml", "config=old.yml"]
    assert answer("isoloss sft config=runs/x/") == ["config=runs/x/config.yaml"]
    assert answer("isoloss config diff ru") == ["runs/"] and answer("isoloss doctor --v") == ["--version"]
    assert answer("isoloss sft --help opt") == ["optim"] and answer("isoloss completion z") == ["zsh"]
    assert answer("isoloss nothing x") == [] and answer("isoloss sft model.path=none/x") == []


BASH = """
source <("$1" -c 'from isoloss.tools.command.completion import main; main(["bash"])')
isoloss() { "$python" -c 'from isoloss.tools.command.__main__ import main; main()' "$@"; }
python=$1
complete_line() {
    COMP_LINE=$1 COMP_POINT=${#1}
    _isoloss 2>/dev/null
    printf '%s;' "${COMPREPLY[@]}"
    echo
}
complete_line 'isoloss sf'
complete_line 'isoloss sft preset=8b_1g'
complete_line 'isoloss sft optim.l'
complete_line 'isoloss sft data.train=[x,tr'
complete_line 'isoloss sft zzz'
complete -p isoloss isoloss-sft
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(tmp_path):
    (tmp_path / "train.jsonl").touch()
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", sys.executable], cwd=tmp_path, text=True, capture_output=True, check=True
    )
    assert done.stdout.splitlines() == [
        "sft;",
        "8b_1gpu;",  # bash has put "preset=" into the line already
        "optim.lr=;",
        "[x,train.jsonl;",
        ";",
        "complete -F _isoloss isoloss",
        "complete -F _isoloss isoloss-sft",
    ]
    assert sorted(completion.PROGRAMS.split()) == sorted(SCRIPTS)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_its_script():
    subprocess.run(["zsh", "-f", "-n", "-c", completion.ZSH], check=True)
