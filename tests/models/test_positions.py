import math
from fractions import Fraction

import pytest
import torch

from lightscale.models.positions import lrpe, lrpe_angles, lrpe_phases


def exact_phase(position: int, theta: float) -> float:
    """position · theta modulo 2π, in exact arithmetic but for π itself (40 digits)."""
    pi = Fraction("3.1415926535897932384626433832795028841971")
    return float((position * Fraction(theta)) % (2 * pi))


def test_angles_run_over_heads_and_channels() -> None:
    angles = lrpe_angles(3, 4)
    assert angles.dtype == torch.float64
    for head in range(3):
        for channel in range(4):
            j = 4 * head + channel
            assert float(angles[head, channel]) == pytest.approx(10000 ** (-2 * j / 12), rel=1e-14)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 3e-7)])
def test_phases_stay_exact_at_a_million_tokens(dtype: torch.dtype, limit: float) -> None:
    theta = lrpe_angles(2, 8).to(dtype)
    positions = torch.tensor([[0, 1, 511, 1_000_003], [16_777_217, 5, 0, 1]])
    cos, sin = lrpe_phases(positions, theta)
    assert cos.dtype == sin.dtype == dtype
    assert cos.shape == (2, 4, 2, 8)
    for row in range(2):
        for place in range(4):
            for head in range(2):
                for channel in range(8):
                    phase = exact_phase(int(positions[row, place]), float(theta[head, channel]))
                    where = (row, place, head, channel)
                    assert float(cos[where]) == pytest.approx(math.cos(phase), abs=limit)
                    assert float(sin[where]) == pytest.approx(math.sin(phase), abs=limit)


def test_products_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 2, 4, generator=generator, dtype=torch.float64).unbind()
    theta = lrpe_angles(2, 4)

    def product(t: int, s: int) -> torch.Tensor:
        at_t, at_s = (lrpe_phases(torch.tensor([[place]]), theta) for place in (t, s))
        return (lrpe(q, at_t) * lrpe(k, at_s)).sum(dim=-1)

    direct = (q * k * torch.cos(7 * theta)).sum(dim=-1)
    for s in (0, 1, 100, 12345):
        torch.testing.assert_close(product(s + 7, s), direct, rtol=0, atol=1e-9)


def test_the_width_doubles_and_the_dtype_stays() -> None:
    x = torch.ones(1, 3, 2, 4, dtype=torch.bfloat16)
    out = lrpe(x, lrpe_phases(torch.tensor([[0, 1, 2]]), lrpe_angles(2, 4).float()))
    assert (out.shape, out.dtype) == ((1, 3, 2, 8), torch.bfloat16)
    assert torch.equal(out[:, 0], torch.cat([torch.ones(1, 2, 4), torch.zeros(1, 2, 4)], dim=-1).bfloat16())


def test_the_gradient_of_the_angles() -> None:
    theta = lrpe_angles(1, 3).requires_grad_()
    positions, x = torch.tensor([[0, 3, 7]]), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def out(theta: torch.Tensor) -> torch.Tensor:
        return lrpe(x.expand(1, 3, 1, 3), lrpe_phases(positions, theta))

    assert torch.autograd.gradcheck(out, (theta,))
    single = lrpe_angles(1, 3).float().requires_grad_()
    lrpe(x.float().expand(1, 3, 1, 3), lrpe_phases(positions, single)).sum().backward()
    out(theta).sum().backward()
    assert single.grad is not None and theta.grad is not None
    torch.testing.assert_close(single.grad.double(), theta.grad, rtol=1e-5, atol=1e-6)
