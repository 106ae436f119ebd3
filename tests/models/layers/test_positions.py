import pytest
import torch

from lightscale.models.layers.positions import lrpe_angles


def test_angles_run_over_heads_and_channels() -> None:
    angles = lrpe_angles(3, 4)
    assert angles.dtype == torch.float64
    for head in range(3):
        for channel in range(4):
            j = 4 * head + channel
            assert float(angles[head, channel]) == pytest.approx(10000 ** (-2 * j / 12), rel=1e-14)
