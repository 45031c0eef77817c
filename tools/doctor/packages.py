"""Packages: what a run needs, and what of it does not go together."""

import sys
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from isoloss.parallel import UserError
from isoloss.parallel.runtime import versions
from isoloss.parallel.runtime.versions import version_of
from isoloss.tools.doctor.findings import Finding, note, ok, problem
from isoloss.tools.doctor.installed import Installed, needs_of
from isoloss.tools.doctor.probe import failure_of

JUDGED_APART = ("torch", "megatron-core")  # of isoloss's own requirements
INSTALL_TORCH = f"pip install torch=={versions.TESTED_TORCH}"
INSTALL_MEGATRON = f"pip install megatron-core=={versions.SUPPORTED_MEGATRON}"


def check_packages(installed: Installed, has_gpu: bool) -> Iterator[Finding]:
    """has_gpu: nvidia-smi lists one. Transformer Engine is imported, in a process of its own."""
    yield check_python(tuple(sys.version_info[:3]))
    yield check_torch(installed)
    if installed.cuda is not None:
        yield check_nccl(installed)
    yield check_megatron(installed)
    yield from check_transformer_engine(installed, has_gpu)
    yield from check_apex()
    yield check_sglang(installed)
    yield from check_requirements()


def check_python(version: tuple[int, ...]) -> Finding:
    state, oldest = ".".join(map(str, version)), ".".join(map(str, versions.OLDEST_PYTHON))
    if version[:2] < versions.OLDEST_PYTHON:
        return problem("Python", state, f"use Python {oldest} or newer (make PYTHON=python{oldest})")
    return ok("Python", state)


def check_torch(installed: Installed) -> Finding:
    if installed.torch is None:
        return problem("torch", "not installed", INSTALL_TORCH)
    state = f"{installed.torch}, built for {f'CUDA {installed.cuda}' if installed.cuda else 'the CPU'}"
    if Version(installed.torch) < Version(versions.OLDEST_TORCH):
        return problem("torch", state, f"isoloss needs {versions.OLDEST_TORCH} or newer: {INSTALL_TORCH}")
    if versions.public(installed.torch) != versions.TESTED_TORCH:
        return note("torch", f"{state}; isoloss was run with {versions.TESTED_TORCH} only")
    return ok("torch", state)


def check_nccl(installed: Installed) -> Finding:
    """Check the NCCL of a torch that was built for CUDA."""
    pin, found = installed.pinned_nccl, installed.nccl
    if pin is None:
        return note("NCCL", f"torch {installed.torch} does not say in its metadata which it has")
    install = f"pip install nvidia-nccl-cu{str(installed.cuda).partition('.')[0]}=={pin}"
    if found is None:
        return problem("NCCL", f"not installed, and torch {installed.torch} loads {pin}", install)
    if Version(found) < Version(pin):
        return problem("NCCL", f"{found}, older than the {pin} of torch {installed.torch}", install)
    return ok("NCCL", found) if found == pin else note("NCCL", f"{found}; torch {installed.torch} comes with {pin}")


def check_megatron(installed: Installed) -> Finding:
    what, found = "Megatron-Core", installed.megatron_core
    if found is None:
        return problem(what, "not installed", INSTALL_MEGATRON)
    known = next((release for release in versions.MEGATRON_RELEASES if release.version == found), None)
    if known is not None and known.usable:
        supported = versions.SUPPORTED_MEGATRON
        return ok(what, found if found == supported else f"{found}; most of what was run, was run with {supported}")
    return problem(what, f"{found}: {known.use if known else 'not known to isoloss'}", INSTALL_MEGATRON)


def check_transformer_engine(installed: Installed, has_gpu: bool) -> Iterator[Finding]:
    what, found = "Transformer Engine", installed.transformer_engine
    if found is None:
        yield ok(what, "not installed; only model.transformer_engine=true needs it")
        return
    release = next((each for each in versions.MEGATRON_RELEASES if each.version == installed.megatron_core), None)
    asked = SpecifierSet((release and release.transformer_engine) or "", prereleases=True)
    if Version(found) in asked:
        yield ok(what, found)
    else:
        state, fix = f"{found}; Megatron-Core {installed.megatron_core} asks for {asked}", f"install one of {asked}"
        oldest = min(Version(each.version) for each in asked)
        yield problem(what, state, fix) if Version(found) < oldest else note(what, state, fix)
    failure = failure_of("import transformer_engine.pytorch")
    if failure is not None:
        fix = "build it for this torch and this CUDA, or pip uninstall it and leave model.transformer_engine=false"
        state = f"{found} does not import: {failure}"
        yield problem(what, state, fix) if has_gpu else note(what, state, "none without a GPU, which its import needs")


def check_apex() -> Iterator[Finding]:
    try:
        versions.check_apex()
    except UserError as error:
        state, _, fix = str(error).rpartition(": ")
        yield problem("apex", state, fix)


def check_sglang(installed: Installed) -> Finding:
    """Check an SGLang in this environment, where it need not be."""
    if installed.sglang is None:
        return ok("SGLang", "not in this environment; servers have one of their own")
    needs = installed.sglang_torch
    if needs is not None and (installed.torch is None or not needs.specifier.contains(installed.torch)):
        return problem(
            "SGLang",
            f"{installed.sglang} in this environment, and it needs {needs}: here is {installed.torch}",
            "give servers an environment of their own (docs/rollout.md)",
        )
    return ok("SGLang", f"{installed.sglang} in this environment")


def check_requirements() -> Iterator[Finding]:
    """The other packages that isoloss requires, by the metadata of its own installation."""
    if version_of("isoloss") is None:
        yield note("packages", "isoloss is on the path and not installed: what it requires is not compared")
        return
    needs = [need for need in needs_of("isoloss") if need.name not in JUDGED_APART]
    for need in needs:
        found = version_of(need.name)
        if found is None:
            yield problem(need.name, "not installed", f"pip install '{need.name}{need.specifier}'")
        elif not need.specifier.contains(found, prereleases=True):
            fix = f"pip install '{need.name}{need.specifier}'"
            yield problem(need.name, f"{found}; isoloss requires {need.specifier}", fix)
    yield ok("packages", f"{len(needs)} more that isoloss requires were compared")
