"""Vocabulary over tensor parallelism: the sum of the parts is the dense result, whoever holds only padding."""

import pytest
import torch
from support.ranks.vocab import dense_reference, tensor_parallel


@pytest.mark.parametrize(
    ("tp", "vocab", "rows"),
    [
        (2, 31, 16),  # one padding row on the last rank
        (2, 16, 16),  # the last rank holds only padding, from exactly its first row
        (2, 9, 16),  # the same, and the first rank has padding too
        (4, 31, 16),  # two ranks hold only padding
        (4, 3, 1),  # one row a rank, the last one padding
        (4, 40, 10),  # no padding
    ],
)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("fused", [False, True], ids=["in place", "as kernels"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_tensor_parallel_equals_dense(pool, tp, vocab, rows, chunk, fused, softcap):
    targets = torch.arange(12) % vocab  # every rank that holds true columns owns a target
    targets[-1] = vocab - 1
    check(pool, tp, vocab, rows, chunk * rows, fused, softcap, targets)


@pytest.mark.parametrize("fused", [False, True], ids=["in place", "as kernels"])
@pytest.mark.parametrize(("vocab", "rows", "chunk", "softcap"), [(31, 16, 3, None), (9, 16, 1000, 2.0)])
def test_several_targets_of_a_position_over_tensor_parallelism(pool, vocab, rows, chunk, softcap, fused):
    """Targets of a position lie on both ranks, or on one; some are the same."""
    targets = torch.randint(vocab, (12, 5), generator=torch.Generator().manual_seed(1))
    targets[::2, 3] = targets[::2, 0]
    check(pool, 2, vocab, rows, chunk * rows, fused, softcap, targets)


def check(pool, tp, vocab, rows, chunk_elements, fused, softcap, targets):
    random = torch.Generator().manual_seed(vocab)
    n, d = len(targets), 6
    hidden, weight = (torch.randn(size, d, generator=random, dtype=torch.float64) for size in (n, vocab))
    grads = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in (targets.shape, (n,))]
    wanted = dense_reference(hidden, weight, targets, (grads[0], grads[1]), softcap=softcap)

    options = chunk_elements, fused, softcap
    ranks = pool.run(tp, tensor_parallel, hidden, weight, rows, targets, (grads[0], grads[1]), *options)
    for logprobs, entropy, hidden_grad, _ in ranks:
        for got, reference in zip((logprobs, entropy, hidden_grad), wanted):
            torch.testing.assert_close(got, reference, rtol=1e-12, atol=1e-12)
    weight_grad = torch.cat([rank[3] for rank in ranks])
    torch.testing.assert_close(weight_grad[:vocab], wanted[3], rtol=1e-12, atol=1e-12)
    assert not weight_grad[vocab:].any()


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_without_positions(pool, tp):
    nothing = torch.zeros(0, dtype=torch.float64)
    hidden, weight = torch.zeros(0, 6, dtype=torch.float64), torch.ones(9, 6, dtype=torch.float64)
    ranks = pool.run(tp, tensor_parallel, hidden, weight, 8, nothing.long(), (nothing, nothing), 1)
    for logprobs, entropy, hidden_grad, weight_grad in ranks:
        assert logprobs.shape == entropy.shape == (0,) and hidden_grad.shape == (0, 6)
        assert torch.equal(weight_grad, torch.zeros(8, 6, dtype=torch.float64))
