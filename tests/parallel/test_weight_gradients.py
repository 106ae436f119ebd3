"""Products that add their result to a sum, against fp64."""

import pytest
import torch

from lightscale.parallel.weight_gradients import accumulate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_fp64(dtype: torch.dtype) -> None:
    """Two micro-batches; in bf16 too nothing is rounded but the inputs."""
    generator = torch.Generator().manual_seed(0)
    total, exact = torch.zeros(5, 7), torch.zeros(5, 7).double()
    for _ in range(2):
        x, gradient = (torch.randn(40, width, generator=generator).to(dtype) for width in (7, 5))
        accumulate(x, gradient, total)
        exact += gradient.double().t() @ x.double()
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)
