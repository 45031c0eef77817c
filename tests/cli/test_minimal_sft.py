"""The readable recipe is the recipe: the same losses, on one rank and on two."""

import pytest
from support.recipes import minimal_losses, recipe_losses


def test_the_readable_twin_gives_the_recipes_numbers(pool, tmp_path):
    expected = pool.run(1, recipe_losses, str(tmp_path), 3)[0]
    assert len(expected) == 3 and expected[2] < expected[0]
    for world in (1, 2):
        for losses in pool.run(world, minimal_losses, str(tmp_path), 3):
            assert losses == pytest.approx(expected, rel=1e-6)
