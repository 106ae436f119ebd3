import pytest
import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles, Phases, phases_of
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.positions import lrpe_angles, rope, rope_phases


def test_angles_run_over_heads_and_channels() -> None:
    angles = lrpe_angles(3, 4)
    assert angles.dtype == torch.float64
    for head in range(3):
        for channel in range(4):
            j = 4 * head + channel
            assert float(angles[head, channel]) == pytest.approx(10000 ** (-2 * j / 12), rel=1e-14)


@pytest.mark.parametrize("width", [6, 4])
def test_rotations_are_products_of_complex_numbers(width: int) -> None:
    """The first ``width`` of 6 channels, forward and backward, in fp64."""
    x, cotangent = torch.randn(2, 2, 5, 3, 6, dtype=torch.float64)
    x.requires_grad_()
    positions, theta = torch.randint(0, 100, (2, 5)), torch.rand(1, width // 2, dtype=torch.float64)
    rotated = rope(x, rope_phases(phases_of(Angles(theta, positions), torch.float64), torch.float64))
    (gradient,) = torch.autograd.grad(rotated, x, cotangent)
    angle = positions[..., None, None] * theta

    def by_complex(y: Tensor, sign: int) -> Tensor:
        pairs = torch.complex(y[..., : width // 2], y[..., width // 2 : width])
        turned = pairs * torch.polar(torch.ones_like(angle), sign * angle)
        return torch.cat([turned.real, turned.imag, y[..., width:]], dim=-1)

    torch.testing.assert_close(rotated, by_complex(x, 1))
    torch.testing.assert_close(gradient, by_complex(cotangent, -1))


def test_layers_with_the_same_angles_share_their_phases() -> None:
    made: list[str] = []

    def of(name: str) -> Phases:
        def make(positions: Tensor) -> Phases:
            made.append(name)
            return positions.double(), positions.double()

        return context.phases_of(name, make)

    context = SequenceContext.of(torch.arange(4)[None])
    first = of("slow")
    assert of("fast")[0] is not first[0]
    assert of("slow")[0] is first[0]
    assert made == ["slow", "fast"]
    context = SequenceContext.of(torch.arange(4)[None] + 1)
    assert of("slow")[0] is not first[0], "of another pass"
