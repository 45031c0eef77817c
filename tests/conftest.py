"""What every process of the tests does. The fixtures of all tests are in support/suite/fixtures.py."""

import importlib

import hypothesis
import pytest
from support.suite.durations import Durations
from support.suite.tiers import Schedule


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="1/1", help="of the full rows, one of so many shares: 2/3")


def pytest_configure(config: pytest.Config) -> None:
    # No test fails because the machine is busy.
    hypothesis.settings.register_profile(
        "any load", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any load")
    config.pluginmanager.register(Durations(config))
    config.pluginmanager.register(Schedule())
    if not only_gathers(config):
        # Seconds of imports, which a process that runs no test would keep its workers waiting for.
        config.pluginmanager.register(importlib.import_module("support.suite.fixtures"))


def only_gathers(config: pytest.Config) -> bool:
    """Whether this process starts pytest-xdist's workers, and gathers what they report."""
    is_worker = hasattr(config, "workerinput")
    return bool(config.getoption("numprocesses", None)) and not is_worker and not config.option.collectonly
