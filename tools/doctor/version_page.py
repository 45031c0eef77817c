"""Write docs/versions.md from the table of parallel/runtime/versions.py."""

from collections.abc import Iterable, Sequence

from isoloss.parallel.runtime import versions

HEAD = """# Versions

Which versions go together, and what was run with them. [`isoloss-doctor`](doctor.md) compares an installation with this
page. It is generated: `python -m isoloss.tools.doctor --versions > docs/versions.md`, from
`parallel/runtime/versions.py`.

The facts are those of package metadata on PyPI, for Linux on x86-64.
"""
ABOUT_NCCL = """NCCL forms a group only between processes of one version ("Mismatched NCCL version detected"). So
`rollout.weight_sync=broadcast` needs servers with the trainer's NCCL; `tensor` and `disk` form no group with them.

A server reports its release of SGLang, not its NCCL. What is compared is the NCCL of the torch wheel that the release
pins; a container image may have exchanged it. A trainer whose NCCL is not that of its own torch wheel is let pass: it
was chosen to fit such servers."""
ABOUT_IMAGES = """`recipes/containers/Dockerfile` builds a trainer, servers, and a node with both. Each has an
environment of its own ([cluster](cluster.md#containers)). **It was not built.** A test compares its versions with this
table."""
ABOUT_EXTRAS = """\
- `isoloss[gpu]` adds Transformer Engine. Its torch part is built when it is installed, against the torch
  that is there. So install torch first, and give pip `--no-build-isolation`. Without that, pip builds it for the
  newest torch.
- `isoloss[sglang]` adds SGLang to the trainer's environment. The metadata of both allow it, for Python 3.11 to 3.13 and
  with the torch and transformers that SGLang pins. `constraints.txt` names another transformers, so leave it out. Not
  run: the tests run servers in an environment of their own."""

MEGATRON_017 = """\
With 0.17.1, Python 3.12.1 and PyTorch's build for CUDA on a machine without a GPU the quick tests pass
(`make test-newer`). Not run: the other tests, real Transformer Engine, and any GPU. What is computed again in the
backward is copied, where 0.17 would compile C++ to share its memory (`models/mcore/patches.py`)."""
MEGATRON_019 = """### What 0.19 takes

0.19.2 trains: on Python 3.12.1 these of the quick tests pass with it, in which models of all families are on all kinds
of layouts: `tests/numerics/`: `test_transformers_parity.py`, `test_invariance.py`, `test_moe_invariance.py` and
`test_odd_degrees.py`. In an earlier experiment losses and gradient norms of a dense model were those of 0.16.1 bit by
bit. Three things are to be done before a run can use it:

1. **Triton.** `pipeline_parallel/schedules.py` imports `moe/paged_stash.py`, and that Triton, which PyTorch's builds
   for the CPU do not bring. Require `triton` with 0.18 and later on Linux. There is none for macOS.
2. **Checkpoints.** There is no `common.pt`. What stood in it is an object among the tensors: the key
   `common_state/shard_0_1` of `.metadata`, a list of one dictionary as torch.save writes it, in a `.distcp` file of
   rank 0. 0.19 still reads a folder with a `common.pt`; 0.17 and older do not read the new form. Of isoloss:
   - `read_extra` (`engine/checkpoint/checkpoint.py`) compares the checksum of `common.pt` before it reads it: of the
     new form, it is that of the `.distcp` file that `.metadata` names.
   - `read_common` (`models/weights/pickle_check.py`) reads `common.pt`, for Megatron too. Of the new form it must read
     the bytes at the place that `.metadata` gives.
   - `models/weights/megatron_args.py` unpickles `common.pt` without running it: the same for the bytes at the place
     that `.metadata` gives. `Folder` (`models/weights/distcp.py`) keeps the places of tensors only, so far.
   - The converter (`models/conversion/distcp_write.py`) goes on writing `common.pt`, which every release reads.
     `metadata.json` has two keys more than 0.19 writes; it passes over them.
   - Tests: `test_converted_names.py` compares our files with Megatron's; `test_resume.py` damages every file by name;
     `test_offload.py` and `test_megatron_runs.py` open `common.pt`. A test has to load, in each release, what the
     other one saved.
3. **Asynchronous saves** are NVIDIA's resiliency extension from then on. isoloss waits for its saves
   (`engine/checkpoint/writer.py`), and uses no more than the classes of Megatron that are left."""


def page() -> str:
    heads = "set", "Python", "torch", "CUDA", "NCCL", "Megatron-Core", "Transformer Engine", "SGLang", "driver"
    sets = _table(heads, map(_set_row, versions.SETS))
    run = "\n".join(f"- **{each.name}** (`{'`, `'.join(each.weight_syncs)}`): {each.run}" for each in versions.SETS)
    wheels = [(each.version, each.cuda, each.nccl) for each in versions.TORCH_WHEELS]
    servers = [(each.sglang, each.python, each.torch, each.nccl) for each in versions.SERVER_RELEASES]
    megatron = [
        (each.version, each.python, each.transformer_engine or "", each.use) for each in versions.MEGATRON_RELEASES
    ]
    drivers = [(str(cuda), f"R{driver} or newer") for cuda, driver in versions.OLDEST_DRIVER.items()]
    parts = [
        HEAD,
        f"## Sets\n\nServers have an environment of their own.\n\n{sets}\n\n"
        f"With each, the values of `rollout.weight_sync` that servers can have, and what was run:\n\n{run}\n",
        f"## Images\n\n{ABOUT_IMAGES}\n\n{_table(('part', 'version'), _image_rows())}\n",
        f"## Extras\n\n{ABOUT_EXTRAS}\n",
        f"## NCCL\n\n{ABOUT_NCCL}\n\n{_table(('torch from PyPI', 'CUDA', 'NCCL'), wheels)}\n\n"
        f"{_table(('SGLang', 'Python', 'torch', 'NCCL'), servers)}\n",
        f"## Megatron-Core\n\n{_table(('release', 'Python', 'Transformer Engine', 'use'), megatron)}\n\n"
        f"{MEGATRON_017}\n\n{MEGATRON_019}\n",
        f"## Driver\n\n{_table(('CUDA of torch', 'NVIDIA driver'), drivers)}",
    ]
    return "\n".join(parts)


def _image_rows() -> list[tuple[str, str]]:
    images, made = versions.IMAGES, versions.set_of_images()
    return [
        ("base image", f"`nvidia/cuda:{images.cuda}-cudnn-devel-ubuntu24.04`"),
        ("torch, with NCCL", f"{made.torch}, {made.nccl}"),
        ("Transformer Engine", images.transformer_engine),
        ("SGLang", made.sglang),
    ]


def _set_row(row: versions.VersionSet) -> tuple[str, ...]:
    driver = f"R{row.driver}" if row.driver else ""
    cells = row.name, row.python, row.torch, row.cuda, row.nccl, row.megatron_core, row.transformer_engine, row.sglang
    return (*(cell or "" for cell in cells), driver)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
