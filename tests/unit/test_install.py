"""The environments that the Makefile makes are what pip would make of them, under pip's settings."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from isoloss.tools.dev import install

LISTING = """\
global.extra-index-url='http://a/simple\\nhttp://b/simple'
global.find-links='/wheels http://links'
global.constraint='/x.txt'
download.index-url='http://no/simple'
install.find-links='/other /wheels'
:env:.constraint='/y.txt /z.txt'
:env:.disable-pip-version-check='1'
"""


def test_settings_of_pip_are_given_to_uv():
    variables, options = install.translate(install.settings_of(LISTING), "http://main/simple")
    assert variables == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "http://main/simple",
        "UV_EXTRA_INDEX_URL": "http://main/simple http://a/simple http://b/simple",
        "UV_FIND_LINKS": "/other,/wheels",
    }
    assert options == ["--constraint", "/y.txt", "--constraint", "/z.txt"]


def test_the_index_that_pip_is_told_to_use_is_the_only_one():
    variables, _ = install.translate({"index-url": "http://mine/simple"}, "http://main/simple")
    assert variables["UV_DEFAULT_INDEX"] == "http://mine/simple" and "UV_EXTRA_INDEX_URL" not in variables


@pytest.mark.parametrize(
    ("settings", "uv", "says"),
    [
        ("global.only-binary=':all:'", "uv", "pip's setting only-binary means nothing to uv"),
        ("", None, "there is no uv, and pip does not get uv=="),
        ("", "uv", "uv ended with status 1: no such version"),
    ],
)
def test_pip_installs_what_uv_cannot(settings, uv, says, monkeypatch, capsys):
    calls = []

    def run(command, **_) -> SimpleNamespace:
        calls.append(command)
        status = 1 if command[0] == "uv" else 0
        return SimpleNamespace(returncode=status, stdout=settings, stderr="no such version\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(install, "default_index", lambda: "http://main/simple")
    monkeypatch.setattr(install, "find_uv", lambda: uv)
    assert install.main(["torch", "-c", "constraints.txt"]) == 0
    assert calls[-1] == [sys.executable, "-m", "pip", "install", "--quiet", "torch", "-c", "constraints.txt"]
    assert capsys.readouterr().err.startswith(says)


def test_uv_installs_into_the_environment_of_this_interpreter(monkeypatch):
    calls = []

    def run(command, **_) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(returncode=0, stdout="global.constraint='/x.txt'", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(install, "default_index", lambda: "http://main/simple")
    monkeypatch.setattr(install, "find_uv", lambda: "uv")
    assert install.main(["torch"]) == 0
    quiet = ["uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", sys.executable]
    expected = [*quiet, "--constraint", "/x.txt", "torch"]
    assert calls[1:] == [expected]
