"""The images: their versions are those of the table, and what they copy and run is there. None is built: that takes a
Docker engine, and gigabytes."""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from support.plans import dockerfile

from isoloss.parallel.runtime import versions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes/containers"
FILE = dockerfile.read(FOLDER / "Dockerfile")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
UBUNTUS_PYTHON = "3.12"  # of 24.04
# What they have that is no version of the table.
OF_THE_BUILD = {("TORCH_CUDA_ARCH_LIST", "9.0"), ("MAX_JOBS", "8")}


def test_versions_are_those_of_the_table():
    made, images = versions.set_of_images(), versions.IMAGES
    wanted = {
        ("TORCH", made.torch),
        ("NCCL", made.nccl),
        ("SGLANG", made.sglang),
        ("CUDA", images.cuda),
    }
    assert dockerfile.arguments(FILE) == wanted | OF_THE_BUILD


def test_the_images_can_send_weights_by_nccl():
    """torch, its NCCL and its CUDA are those of the servers; the base image has the nvcc of that CUDA."""
    made, images = versions.set_of_images(), versions.IMAGES
    (release,) = [each for each in versions.SERVER_RELEASES if each.sglang == made.sglang]
    assert (made.torch, made.nccl) == (release.torch, release.nccl) and "broadcast" in made.weight_syncs
    assert made.cuda is not None and images.cuda.startswith(f"{made.cuda}.")
    assert all(SpecifierSet(each.python).contains(UBUNTUS_PYTHON) for each in (made, release))


def test_every_version_is_used_where_it_is_defined():
    for each in FILE:
        if each.word == "ARG" and (name := each.text.partition("=")[0]) not in dict(OF_THE_BUILD):
            within = [other.text for other in FILE if other.stage == (each.stage or "base")]
            assert any(f"${{{name}}}" in text for text in within), f"{each.stage}: {name} is not used"
    for each in FILE:
        defined = {name for name, _ in dockerfile.arguments([o for o in FILE if o.stage in (each.stage, "")])}
        assert set(re.findall(r"\$\{(\w+)\}", each.text)) <= defined, each.text


def test_extras_are_those_of_the_table():
    (engine,), (sglang,) = ([Requirement(each) for each in EXTRAS[name]] for name in ("gpu", "sglang"))
    made, images = versions.set_of_images(), versions.IMAGES
    assert (engine.name, engine.extras) == ("transformer-engine", {"core-cu13", "pytorch"})
    assert engine.specifier == SpecifierSet(f"=={images.transformer_engine}")
    assert made.transformer_engine and SpecifierSet(made.transformer_engine).contains(images.transformer_engine)
    assert (sglang.name, sglang.specifier) == ("sglang", SpecifierSet(f"=={made.sglang}"))
    # CUDA's major version is a part of the name of the extra.
    assert made.cuda is not None and f"core-cu{made.cuda.split('.')[0]}" in engine.extras


def test_stages_and_copies():
    assert dockerfile.parents(FILE) == {
        "base": "nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04",
        "server": "base",
        "trainer": "base",
        "node": "trainer",
    }
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for each in (each for each in FILE if each.word == "COPY"):
        *sources, _ = each.text.split()
        if sources[0].startswith("--from="):
            assert sources == ["--from=server", "/opt/sglang"]
            continue
        for source in sources:
            assert (ROOT / source).exists(), each.text
            assert f"!{source.split('/')[0]}" in ignored, f"{source} is not in the context"


def test_the_package_is_copied_whole():
    """setup.py finds the packages that it names, and pyproject.toml the files."""
    copies = [each.text.split() for each in FILE if (each.word, each.stage) == ("COPY", "trainer")]
    copied = {word for words in copies for word in words}
    folders = re.search(r"FOLDERS = \((.*)\)", (ROOT / "setup.py").read_text())
    assert folders is not None
    wanted = {*re.findall(r'"(\w+)"', folders[1]), "setup.py", "pyproject.toml", "README.md", "LICENSE"}
    assert wanted <= copied


def test_the_shell_reads_every_command():
    for each in (each for each in FILE if each.word == "RUN"):
        done = subprocess.run(["bash", "-n", "-c", each.text], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), each.text
    pips = [each.text for each in FILE if each.stage == "trainer" and "pip install" in each.text]
    assert '"torch==${TORCH}"' in pips[0] and ".[gpu]" in pips[-1] and "--no-build-isolation" in pips[-1]
