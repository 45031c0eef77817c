"""What follows from the layers of a model, for every model of the tests: equal to what golden.json holds of it."""

import pytest
from support.models.golden import NAMES, golden, record


@pytest.mark.parametrize("name", NAMES)
def test_what_follows_from_an_architecture_is_as_recorded(name):
    # Lists, as JSON has them: a difference names the section, which `support.models.golden` prints.
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in record(name).items()} == golden()[
        name
    ]
