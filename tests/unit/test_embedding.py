"""An embedding that adds its gradient to a buffer, against autograd."""

import pytest
import torch
from torch.nn.functional import embedding

from isoloss.parallel.ops.embedding import embed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_gradient_added_to_a_buffer_is_that_of_autograd(dtype):
    """Of tokens that repeat, in two backwards; what was there stays. The hook is woken, and told."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 4, generator=random).to(dtype).requires_grad_()
    tokens, grad = torch.randint(7, (2, 6), generator=random), torch.randn(2, 6, 4, generator=random).to(dtype)
    buffer = torch.ones(9, 4, dtype=torch.promote_types(dtype, torch.float32))
    woken = []
    weight.register_post_accumulate_grad_hook(woken.append)
    for _ in range(2):
        rows = embed(tokens, weight, buffer, shared=False)
        assert torch.equal(rows, embedding(tokens, weight))
        rows.backward(grad)
    assert len(woken) == 2 and weight.grad_added_to_main_grad
    exact = weight.detach().double().requires_grad_()
    embedding(tokens, exact).backward(2 * grad.double())
    torch.testing.assert_close(buffer.double(), 1 + exact.grad, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_of_a_matrix_with_another_use_autograd_gets_that_gradient_alone():
    weight, buffer = torch.randn(5, 3, requires_grad=True), torch.zeros(5, 3)
    (embed(torch.tensor([1, 1]), weight, buffer, shared=True).sum() + 3 * weight.sum()).backward()
    assert torch.equal(weight.grad, torch.full((5, 3), 3.0))
    assert buffer.sum(1).tolist() == [0, 6, 0, 0, 0]
