"""Which layers each pipeline stage holds."""

import pytest

from lightscale.models.stages import layer_stages, megatron_layout


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [
        (4, 1, [4]),
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (24, 16, [1, *[2] * 8, *[1] * 7]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_the_embedding_and_the_output_layer_stand_beside_fewer_layers(
    num_layers: int, num_stages: int, sizes: list[int]
) -> None:
    assert [len(layers) for layers in layer_stages(num_layers, num_stages)] == sizes


@pytest.mark.parametrize("num_layers", range(1, 20))
def test_every_layer_is_on_one_stage_in_order(num_layers: int) -> None:
    for num_stages in range(1, num_layers + 1):
        stages = layer_stages(num_layers, num_stages)
        assert [layer for layers in stages for layer in layers] == list(range(num_layers))
        lengths = [len(layers) for layers in stages]
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) >= 1


def test_megatron_layout() -> None:
    assert megatron_layout(3, 2) == [["embedding", "decoder", "decoder"], ["decoder", "loss"]]
