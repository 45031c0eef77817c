"""Check the machine (GPUs, driver, shared memory, disk, ports, limits) and the rollout servers that it reaches."""

import json
import os
import resource
import shutil
import socket
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isoloss.parallel.runtime import versions
from isoloss.parallel.runtime.nvidia_smi import Driver
from isoloss.tools.doctor.findings import Finding, note, ok, problem
from isoloss.tools.doctor.installed import Installed
from isoloss.tools.doctor.probe import failure_of

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = GIB  # what NCCL's and torch's exchange between the ranks of a node may take
MANY_FILES = 65536
SERVER_SECONDS = 10.0
ENDPOINTS = ("/server_info", "/get_server_info")  # older servers have the second only
WAY_OUT = "set rollout.weight_sync=tensor (servers on the trainer's GPUs) or disk"
WHY_NO_GPU = (
    "import sys, torch; from isoloss.parallel.runtime import device; "
    "torch.cuda.is_available() or sys.exit(device.why_no_gpu())"
)


def check_gpus(driver: Driver | None, installed: Installed) -> Iterator[Finding]:
    """torch is imported, in a process of its own, where there are GPUs that it should see."""
    if driver is None or (not driver.gpus and driver.failure in ("", "No devices were found")):
        yield note("GPUs", f"none: {'nvidia-smi lists none' if driver else 'no nvidia-smi'}; runs are on the CPU")
        return
    if not driver.gpus:
        yield problem("GPUs", f"nvidia-smi failed: {driver.failure}", "install or restart the NVIDIA driver")
        return
    kinds = Counter(driver.gpus)
    state = ", ".join(f"{number} x {name}" for name, number in kinds.items())
    if len(kinds) == 1:
        yield ok("GPUs", state)
    else:
        yield note("GPUs", state, "use those of one kind (CUDA_VISIBLE_DEVICES): the slowest and smallest decides")
    if installed.cuda is not None:
        yield check_driver(str(driver.version), installed.cuda)
    failure = failure_of(WHY_NO_GPU) if installed.torch is not None else None
    if failure is not None:
        build = "install a torch that is built for CUDA" if installed.cuda is None else "fix the driver"
        state = f"torch does not see the {len(driver.gpus)} GPU(s) of nvidia-smi: {failure}"
        yield problem("CPU fallback", state, f"{build}, or set train.device=cpu")


def check_driver(version: str, cuda: str) -> Finding:
    """cuda: the CUDA release of the torch build."""
    oldest = versions.OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    if oldest is None:
        return note("driver", f"{version}; which one CUDA {cuda} needs is not known here")
    if int(version.partition(".")[0]) < oldest:
        state = f"{version}, older than the {oldest} that CUDA {cuda} needs"
        return problem("driver", state, f"install driver {oldest} or newer, or a torch for an older CUDA")
    return ok("driver", version)


def check_shared_memory(has_gpu: bool) -> Iterator[Finding]:
    if not SHARED_MEMORY.is_dir():
        return
    size = shutil.disk_usage(SHARED_MEMORY).total
    state = f"{SHARED_MEMORY} {_gib(size)}"
    if size >= LEAST_SHARED_BYTES:
        yield ok("shared memory", state)
        return
    fix = "start the container with --shm-size=16g or --ipc=host"
    state += ", too small for NCCL between the ranks of a node"
    yield problem("shared memory", state, fix) if has_gpu else note("shared memory", state, fix)


def check_disk(folder: Path, wanted: float) -> Finding:
    """folder: where a run writes; need not exist. wanted: GiB that must be free."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return problem("disk", f"{there} cannot be written to", "name another output_dir")
    free = shutil.disk_usage(there).free
    state = f"{_gib(free)} free for {folder}"
    if free < wanted * GIB:
        return problem("disk", f"{state}, of {wanted:g} GiB wanted", "make room, or name another output_dir")
    return ok("disk", state)


def check_ports(ports: Sequence[int]) -> Iterator[Finding]:
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was used a minute ago is free
            try:
                ours.bind(("", port))
            except OSError as error:
                yield problem(f"port {port}", str(error.strerror), "end what has it, or take another port")
            else:
                yield ok(f"port {port}", "free")


def check_limits() -> Iterator[Finding]:
    locked, files = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    if locked == resource.RLIM_INFINITY:
        yield ok("locked memory", "unlimited")
    else:
        fix = "ulimit -l unlimited, if nodes are joined by InfiniBand: NCCL locks its buffers"
        yield note("locked memory", f"{locked >> 10} KiB", fix)
    if files == resource.RLIM_INFINITY or files >= MANY_FILES:
        yield ok("open files", "unlimited" if files == resource.RLIM_INFINITY else str(files))
    else:
        yield note("open files", str(files), f"ulimit -n {MANY_FILES}, if many ranks or servers run on this node")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


# ---- rollout servers -------------------------------------------------------------------------------------------------


def check_servers(urls: Sequence[str], weight_sync: str, installed: Installed) -> Iterator[Finding]:
    """Check that the servers answer. weight_sync: the run's rollout.weight_sync."""
    for url in (url.rstrip("/") for url in urls):
        try:
            info = ask(url)
        except (OSError, ValueError) as error:
            yield problem(url, f"no answer: {error}", "start a server there, or correct the URL")
            continue
        sglang, on_gpu = info.get("version"), str(info.get("device", "cuda")).startswith("cuda")
        yield ok(url, f"SGLang {sglang or 'of unknown version'}, {info.get('device', 'unknown device')}")
        if weight_sync == "broadcast" and on_gpu:
            yield check_nccl_of(url, sglang, installed)


def check_nccl_of(url: str, sglang: str | None, installed: Installed) -> Finding:
    """Compare NCCL with that of a server on GPUs, with which a broadcast of weights forms a group."""
    what, here = f"NCCL with {url}", installed.nccl
    theirs = versions.nccl_of_sglang(sglang)
    if theirs is None or here is None or installed.torch is None:
        unknown = "of the server" if theirs is None else "of this environment"
        return note(what, f"the version {unknown} is not known; both must be the same", f"else {WAY_OUT}")
    both = f"{here} here, {theirs} with SGLang {sglang}"
    if versions.foreign_nccl(installed.torch, here, sglang) is not None:
        return problem(what, f"{both}: NCCL forms no group across versions", WAY_OUT)
    if here != theirs:
        return note(what, f"{both} from its wheel; see that the server has the one here", f"else {WAY_OUT}")
    return ok(what, both)


def ask(url: str) -> Mapping[str, Any]:
    """Return the server's report on itself. Raise OSError if there is none, ValueError if it is no JSON object."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # proxies are for the internet
    for endpoint in ENDPOINTS:
        try:
            with opener.open(url + endpoint, timeout=SERVER_SECONDS) as reply:
                info = json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code != 404 or endpoint == ENDPOINTS[-1]:
                raise
            continue
        if not isinstance(info, dict):
            raise ValueError(f"{url}{endpoint} is no JSON object")
        return info
    raise AssertionError("the last endpoint answers or raises")
