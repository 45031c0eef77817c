"""A wheel works outside of the checkout, and its commands answer before torch is imported."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from isoloss.parallel.runtime.versions import VERSION

ROOT = Path(__file__).parents[2]
PARTS, FILES = (
    ("engine", "models", "parallel", "recipes", "tools"),
    ("setup.py", "pyproject.toml", "README.md", "LICENSE"),
)
TOP = "tools/command/isoloss/"  # which setup.py maps to the package itself
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin folder of an environment with isoloss from a wheel, and everything else from this one."""
    folder = tmp_path_factory.mktemp("install")
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / "source" / part)
    for file in FILES:
        shutil.copy2(ROOT / file, folder / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, folder / "source"],
                   check=True)  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    # Without what makes this environment import the checkout: a path of a .pth file has no .pth files of its own.
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    (site / "others.pth").write_text(str(Path(torch.origin).parents[1]))
    python = folder / "env/bin/python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    return folder / "env/bin"


def run(installed: Path, cwd: Path, *command: str) -> str:
    done = subprocess.run(
        [installed / command[0], *command[1:]], cwd=cwd, text=True, capture_output=True, env={"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_recipe_runs_from_a_wheel(installed, tmp_path):
    """From a folder that is no checkout, with nothing imported of this one."""
    where = (
        "import sys, isoloss.recipes.launch as launch, isoloss.engine.sft.loop\n"
        "assert launch.main('sft', ['config=own.yaml', 'output_dir=out']) == 0\n"
        "print({str(m.__file__) for n, m in sys.modules.items() if n.split('.')[0] == 'isoloss' and m.__file__})"
    )
    (tmp_path / "own.yaml").write_text("preset: tiny\ntrain: {steps: 2, eval_every: 0}\ndata.eval: []\n")
    *_, imported = run(installed, tmp_path, "python", "-c", where).splitlines()
    files = [Path(file) for file in ast.literal_eval(imported)]
    assert len(files) > 50 and all(file.is_relative_to(installed.parent / "lib") for file in files)
    steps = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2 and json.loads(steps[0])["loss"] == pytest.approx(7.65, abs=0.01)  # as README has it
    told = run(installed, tmp_path, "isoloss", "convert", "hf-to-mcore", "--hf", "out/hf", "--out", "mcore")
    assert "wrote" in told and (tmp_path / "mcore/.metadata").is_file()
    assert json.loads((tmp_path / "out/run.json").read_text())["versions"]["isoloss"] == VERSION
    assert "key differs" in run(installed, tmp_path, "isoloss-config", "diff", "out", "out/config.yaml")


def test_commands_of_a_wheel(installed, tmp_path):
    """They answer without a checkout; the doctor finds what is installed, and no fault in where it is."""
    assert run(installed, tmp_path, "isoloss", "--version").startswith(f"isoloss {VERSION}, torch {version('torch')}")
    assert run(installed, tmp_path, "python", "-m", "isoloss").startswith("usage: isoloss SUBCOMMAND")
    assert "tiny" in run(installed, tmp_path, "isoloss-sft", "--help")
    assert VERSION in run(installed, tmp_path, "python", "-c", "import isoloss; print(isoloss.__version__)")
    done = subprocess.run([installed / "isoloss", "doctor"], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode in (0, 1) and "torch" in done.stdout and "Traceback" not in done.stderr


def test_what_ships(installed):
    """Every file of the product that a command reads, with its licence, and nothing of developers' scripts."""
    (wheel,) = installed.parents[1].glob("*.whl")
    assert wheel.name == f"isoloss-{VERSION}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    listed = subprocess.run(["git", "ls-files", *PARTS], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    for file in listed.splitlines():
        if file.startswith(("tools/dev/", "recipes/scripts/", "recipes/containers/")) or not (ROOT / file).is_file():
            continue
        assert (f"isoloss/{file}" in names) != file.startswith(TOP), file
    assert {f"isoloss/{name}" for name in ("__init__.py", "__main__.py", "py.typed")} <= set(names)
    assert f"isoloss-{VERSION}.dist-info/licenses/LICENSE" in names
    assert not [name for name in names if "/dev/" in name or name.startswith(f"isoloss/{TOP}")]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_a_mistake_do_not_wait_for_torch(command):
    """torch and Megatron-Core take seven seconds of the processor. One process has all three calls: a start takes
    longer than they."""
    module, _, function = COMMANDS[command].partition(":")
    script = (
        "import sys\n"
        f"from {module} import {function}\n"
        "for argument in ('--help', '--version', 'no.such.key=1'):\n"
        "    sys.argv[1:] = [argument]\n"
        "    try:\n"
        f"        status = {function}()\n"
        "    except SystemExit as end:\n"
        "        status = end.code\n"
        "    print('imported', argument, status, {'torch', 'megatron', 'transformers'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    found = [line.split(maxsplit=2)[1:] for line in done.stdout.splitlines() if line.startswith("imported")]
    assert found == [["--help", "0 set()"], ["--version", "0 set()"], ["no.such.key=1", "2 set()"]], done
