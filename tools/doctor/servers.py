"""Rollout servers: whether they answer, and whether the trainer can form a group with them."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isoloss.parallel.runtime import versions
from isoloss.tools.doctor.findings import Finding, note, ok, problem
from isoloss.tools.doctor.installed import Installed

SECONDS = 10.0
ENDPOINTS = ("/server_info", "/get_server_info")  # older servers have the second only
WAY_OUT = "set rollout.weight_sync=tensor (servers on the trainer's GPUs) or disk"


def check_servers(urls: Sequence[str], weight_sync: str, installed: Installed) -> Iterator[Finding]:
    """weight_sync: rollout.weight_sync of the run."""
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
    """Of a server on GPUs, before a broadcast of weights forms a group with it."""
    what, here = f"NCCL with {url}", installed.nccl
    theirs = versions.nccl_of_sglang(sglang)
    if theirs is None or here is None or installed.torch is None:
        unknown = "of the server" if theirs is None else "of this environment"
        return note(what, f"the version {unknown} is not known; both must be the same", f"else {WAY_OUT}")
    told = f"{here} here, {theirs} with SGLang {sglang}"
    if versions.foreign_nccl(installed.torch, here, sglang) is not None:
        return problem(what, f"{told}: NCCL forms no group across versions", WAY_OUT)
    if here != theirs:
        return note(what, f"{told} from its wheel; see that the server has the one here", f"else {WAY_OUT}")
    return ok(what, told)


def ask(url: str) -> Mapping[str, Any]:
    """What the server tells of itself. OSError where it does not answer, ValueError where that is no JSON object."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # proxies are for the internet
    for endpoint in ENDPOINTS:
        try:
            with opener.open(url + endpoint, timeout=SECONDS) as reply:
                info = json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code != 404 or endpoint == ENDPOINTS[-1]:
                raise
            continue
        if not isinstance(info, dict):
            raise ValueError(f"{url}{endpoint} is no JSON object")
        return info
    raise AssertionError("the last endpoint answers or raises")
