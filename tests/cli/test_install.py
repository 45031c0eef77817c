"""A wheel works outside of the checkout, and its commands answer before torch is imported."""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS, FILES = (
    ("engine", "models", "parallel", "recipes", "tools"),
    ("setup.py", "pyproject.toml", "README.md", "LICENSE"),
)
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
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
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
    where = "import isoloss.recipes.launch; print(isoloss.recipes.launch.__file__)"
    assert Path(run(installed, tmp_path, "python", "-c", where).strip()).is_relative_to(installed.parent)
    assert "tiny" in run(installed, tmp_path, "isoloss-sft", "--help")
    run(installed, tmp_path, "isoloss-sft", "train.steps=1", "data.eval=[]", "output_dir=out")
    told = run(installed, tmp_path, "isoloss-convert", "hf-to-mcore", "--hf", "out/hf", "--out", "mcore")
    assert "wrote" in told and (tmp_path / "mcore/.metadata").is_file()


def test_scripts_for_developers_do_not_ship(installed):
    (wheel,) = installed.parents[1].glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "isoloss/tools/convert/__main__.py" in names and "isoloss/recipes/conf/sft/config.yaml" in names
    assert not [name for name in names if name.startswith("isoloss/tools/dev")]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_a_mistake_do_not_wait_for_torch(command, capsys):
    """torch and Megatron-Core take seven seconds of the processor."""
    module, _, function = COMMANDS[command].partition(":")
    script = (
        "import sys\n"
        f"from {module} import {function}\n"
        "status = 0\n"
        "try:\n"
        f"    status = {function}()\n"
        "except SystemExit as end:\n"
        "    status = end.code\n"
        "print(status, {'torch', 'megatron', 'transformers'} & set(sys.modules))\n"
    )
    for argument, status in (("--help", 0), ("no.such.key=1", 2)):
        done = subprocess.run([sys.executable, "-c", script, argument], text=True, capture_output=True)
        assert done.stdout.splitlines()[-1] == f"{status} set()", done
