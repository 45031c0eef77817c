"""The readable loop is the recipe: the same rollouts, losses and gradients, on one rank and on two."""

import pytest
from support.recipes import minimal_rl_steps, recipe_rl_steps

MINIBATCHES = 2  # of a generated batch; rounding may make the next one another


def test_the_readable_twin_gives_the_recipes_numbers(pool, sorter, tmp_path):
    expected = pool.run(1, recipe_rl_steps, f"{sorter}/hf", str(sorter), str(tmp_path / "run"), MINIBATCHES)[0]
    assert 0.05 < expected[0].reward < 0.95 and all(step.grad_norm > 0.1 for step in expected)
    for world in (1, 2):
        for told in pool.run(world, minimal_rl_steps, f"{sorter}/hf", str(sorter), MINIBATCHES):
            assert len(told) == MINIBATCHES
            for found, step in zip(told, expected, strict=True):
                assert found.reward == step.reward
                assert found.grad_norm == pytest.approx(step.grad_norm, rel=1e-6)
                # Advantages of both signs nearly cancel in the loss: 1e-6 of the size of its terms, which is about 1.
                assert found.loss == pytest.approx(step.loss, abs=1e-6)
