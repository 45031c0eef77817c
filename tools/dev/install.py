"""Install packages into the environment of the interpreter that runs this: with uv, under the settings of pip.

    .venv/bin/python tools/dev/install.py torch==2.13.0 -c constraints.txt

uv takes a fraction of pip's time, and links what it fetched once into every environment. It does not read pip's
settings (pip.conf and PIP_*: indexes, links, constraints), so they are passed on here. pip installs if it has a setting
without a counterpart, if uv is not to be had, or if uv fails. Needs the standard library and pip.
"""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
UV = "uv==0.13.9"
# Settings of pip, and the variable of uv that means the same; how uv separates several values.
VARIABLES = {
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}
# Settings that do not change the installed files.
HARMLESS = {
    "break-system-packages",
    "cache-dir",
    "disable-pip-version-check",
    "no-cache-dir",
    "no-color",
    "no-input",
    "no-python-version-warning",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "verbose",
}


class NoCounterpart(Exception):
    """pip has a setting that uv cannot be given."""


def settings_of(listing: str) -> dict[str, str]:
    """Parse what `pip config list` prints. A setting of `install` wins over one of `global`, and a variable of the
    environment over both."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in found:
            found[section][name] = ast.literal_eval(value)
    return found["global"] | found["install"] | found[":env:"]


def default_index() -> str:
    """Return the address of the index that pip uses if no setting names one."""
    command = [sys.executable, "-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def translate(settings: Mapping[str, str], default_index: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the options that give uv pip's settings. Raises NoCounterpart."""
    # The newest version over all indexes, as pip chooses: uv would stop at the first index that has the name.
    variables, options = {"UV_INDEX_STRATEGY": "unsafe-best-match"}, []
    # If several indexes have a version, uv sees only the files of the first, where pip sees all. So the main index
    # comes first, which has the files of every platform: a cache of it may have others than this platform's.
    main = settings.get("index-url", default_index)
    variables["UV_DEFAULT_INDEX"] = main
    if extra := settings.get("extra-index-url", "").split():
        variables["UV_EXTRA_INDEX_URL"] = " ".join([main, *extra])
    for name, value in settings.items():
        if name in VARIABLES:
            variable, separator = VARIABLES[name]
            variables[variable] = separator.join(value.split())
        elif name == "constraint":  # options, since uv ignores its variable if the command line has one
            options += [part for path in value.split() for part in ("--constraint", path)]
        elif name not in HARMLESS | {"index-url", "extra-index-url"}:
            raise NoCounterpart(f"pip's setting {name} means nothing to uv")
    return variables, options


def find_uv() -> str | None:
    """Return the path of uv: the machine's own, else one that pip puts into .uv; None if pip does not get it."""
    own, ours = shutil.which("uv"), ROOT / ".uv/bin/uv"
    if own or ours.exists():
        return own or str(ours)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(ROOT / ".uv"), UV]
    done = subprocess.run(command, capture_output=True, text=True)
    return str(ours) if done.returncode == 0 and ours.exists() else None


def with_uv(arguments: Sequence[str]) -> str | None:
    """Install with uv. Return None, or the reason why it was not done."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    try:
        variables, options = translate(settings_of(listing.stdout), default_index())
    except NoCounterpart as error:
        return str(error)
    uv = find_uv()
    if uv is None:
        return f"there is no uv, and pip does not get {UV}"
    # pip compiles what it installs. Where Python writes no bytecode, every process would compile torch again.
    compiled = "--compile-bytecode"
    command = [uv, "pip", "install", "--quiet", compiled, "--python", sys.executable, *options, *arguments]
    done = subprocess.run(command, env=variables | os.environ, capture_output=True, text=True)
    return None if done.returncode == 0 else f"uv ended with status {done.returncode}: {done.stderr.strip()}"


def main(arguments: Sequence[str]) -> int:
    reason = with_uv(arguments)
    if reason is None:
        return 0
    print(f"{reason}\npip installs instead", file=sys.stderr)
    return subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
