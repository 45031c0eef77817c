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
    random = torch.Generator().manual_seed(vocab)
    n, d = 12, 6
    hidden, weight = (torch.randn(size, d, generator=random, dtype=torch.float64) for size in (n, vocab))
    targets = torch.arange(n) % vocab  # every rank that holds true columns owns a target
    targets[-1] = vocab - 1
    grads = torch.randn(2, n, generator=random, dtype=torch.float64)
    wanted = dense_reference(hidden, weight, targets, (grads[0], grads[1]), softcap=softcap)

    options = chunk * rows, fused, softcap
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
