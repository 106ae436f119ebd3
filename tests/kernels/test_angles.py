"""The angles of LRPE: phases, features and their gradients."""

import math
from fractions import Fraction

import pytest
import torch

from lightscale.kernels.common.angles import Angles, features, features_bwd, phases_of, turns_of


def exact_phase(position: int, theta: float) -> float:
    """position · theta modulo 2π, in exact arithmetic but for π itself (40 digits)."""
    pi = Fraction("3.1415926535897932384626433832795028841971")
    return float((position * Fraction(theta)) % (2 * pi))


def angles(heads: int, width: int) -> torch.Tensor:
    return torch.pow(10000.0, -torch.arange(heads * width, dtype=torch.float64) / (heads * width)).view(heads, width)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 3e-7)])
def test_phases_stay_exact_at_a_million_tokens(dtype: torch.dtype, limit: float) -> None:
    theta = angles(2, 8).to(dtype)
    positions = torch.tensor([[0, 1, 511, 1_000_003], [16_777_217, 5, 0, 1]])
    cos, sin = phases_of(Angles(theta, positions), dtype)
    assert cos.dtype == sin.dtype == dtype
    assert cos.shape == (2, 4, 2, 8)
    for row in range(2):
        for token in range(4):
            for head in range(2):
                for channel in range(8):
                    phase = exact_phase(int(positions[row, token]), float(theta[head, channel]))
                    where = (row, token, head, channel)
                    assert float(cos[where]) == pytest.approx(math.cos(phase), abs=limit)
                    assert float(sin[where]) == pytest.approx(math.sin(phase), abs=limit)


def test_products_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 2, 4, generator=generator, dtype=torch.float64).unbind()
    theta = angles(2, 4)

    def product(t: int, s: int) -> torch.Tensor:
        at_t, at_s = (phases_of(Angles(theta, torch.tensor([[token]])), theta.dtype) for token in (t, s))
        return (features(q, at_t) * features(k, at_s)).sum(dim=-1)

    direct = (q * k * torch.cos(7 * theta)).sum(dim=-1)
    for s in (0, 1, 100, 12345):
        torch.testing.assert_close(product(s + 7, s), direct, rtol=0, atol=1e-9)


def test_turns_are_exact_at_a_million_tokens() -> None:
    """What kernels multiply positions with: integers, whose product leaves out whole turns."""
    theta = angles(1, 8).float()
    for position in (1, 511, 1_000_003, 16_777_217):
        turns = (turns_of(theta) * position >> 32).double() * (2 * math.pi / 2**32)
        for channel in range(8):
            phase = exact_phase(position, float(theta[0, channel]))
            assert math.cos(float(turns[0, channel])) == pytest.approx(math.cos(phase), abs=2e-9)
            assert math.sin(float(turns[0, channel])) == pytest.approx(math.sin(phase), abs=2e-9)


def test_the_gradients_of_features() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    theta, positions = angles(2, 4).requires_grad_(), torch.tensor([[0, 3, 7], [5, 6, 7]])

    def out(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return features(x, phases_of(Angles(theta, positions), torch.float64))

    assert torch.autograd.gradcheck(out, (x, theta))
    upstream = torch.randn(2, 3, 2, 8, generator=generator, dtype=torch.float64)
    expected = torch.autograd.grad(out(x, theta), (x, theta), upstream)
    known = Angles(theta.detach(), positions)
    found = features_bwd(x.detach(), upstream, known, phases_of(known, torch.float64))
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    single = angles(2, 4).float().requires_grad_()
    features(x.detach().float(), phases_of(Angles(single, positions), torch.float32)).backward(upstream.float())
    assert single.grad is not None
    torch.testing.assert_close(single.grad.double(), expected[1], rtol=1e-5, atol=1e-5)
