"""Initial weights: the same on every layout, of the distribution that models.md gives, and for ever those of a seed."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightscale.parallel.initialization import draw_weights, named_parameters, normal, set_initializer, shard

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]
AXES = [(4, 4, 1, 1), (4, 2, 2, 1), (4, 1, 2, 2), (4, 1, 4, 1)]  # processes, tensor, pipeline, sequence


class Layers(nn.Module):
    """Parameters as Megatron marks them, ``size`` tensor ranks holding a part each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList()
        self.columns = self._parameter((8 // size, 6), dim=0, stride=1)
        self.rows = self._parameter((8, 12 // size), dim=1, stride=1)
        self.gated = self._parameter((16 // size, 6), dim=0, stride=2)
        self.whole = self._parameter((4, 3), dim=None, stride=1)

    @staticmethod
    def _parameter(shape: tuple[int, int], *, dim: int | None, stride: int) -> nn.Parameter:
        parameter: Any = nn.Parameter(torch.empty(shape))
        parameter.tensor_model_parallel = dim is not None
        parameter.partition_dim, parameter.partition_stride = (-1 if dim is None else dim), stride
        set_initializer(parameter, normal(0.5))
        result: nn.Parameter = parameter
        return result


def drawn(rank: int, size: int, seed: int = 0) -> dict[str, Tensor]:
    model = Layers(size)
    draw_weights(model, seed=seed, tensor_rank=rank, tensor_size=size)
    return {name: parameter.detach() for name, parameter in named_parameters(model)}


@pytest.mark.parametrize("size", [2, 4])
def test_shards_are_parts_of_the_same_tensors(size: int) -> None:
    one, parts = drawn(0, 1), [drawn(rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([part["columns"] for part in parts], dim=0), one["columns"])
    assert torch.equal(torch.cat([part["rows"] for part in parts], dim=1), one["rows"])
    # Each rank holds its part of the gate, then its part of what is gated.
    gates, values = zip(*(part["gated"].chunk(2) for part in parts), strict=True)
    assert torch.equal(torch.cat([*gates, *values]), one["gated"])
    assert all(torch.equal(part["whole"], one["whole"]) for part in parts)


def test_names_and_seeds_decide() -> None:
    one, again, other = drawn(0, 1), drawn(0, 1), drawn(0, 1, seed=1)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["columns"][:4, :3], one["whole"])
    state = torch.get_rng_state()
    drawn(0, 1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"


def test_a_parameter_without_initializer_is_an_error() -> None:
    model = Layers(1)
    model.forgotten = nn.Parameter(torch.empty(3))
    with pytest.raises(AssertionError, match="forgotten has no initializer"):
        draw_weights(model, seed=0, tensor_rank=0, tensor_size=1)


def test_without_tensor_ranks_the_whole_is_kept() -> None:
    whole = torch.arange(6.0).view(3, 2)
    assert shard(whole, nn.Parameter(torch.empty(3, 2)), 0, 1) is whole


def build(rank: int, world_size: int, init_method: str, layouts: list[tuple[int, ...]], seeds: list[int]) -> Any:
    """For each layout and seed the whole tensors, put together by the test's own rule."""
    found = {}
    for axes in layouts:
        for seed in seeds:
            with tiny.engine_on(axes, rank, f"{init_method}-{axes}-{seed}", seed=seed) as engine:
                found[axes, seed] = tiny.weights(engine)
    return found


@pytest.fixture(scope="module")
def on_one(run_ranks: RunRanks) -> dict[int, dict[str, Tensor]]:
    one = (1, 1, 1, 1)
    (found,) = run_ranks(build, 1, [one], [0, 1])
    return {seed: found[one, seed] for seed in (0, 1)}


def test_every_layout_starts_from_the_same_weights(run_ranks: RunRanks, on_one: dict[int, dict[str, Tensor]]) -> None:
    expected = on_one[0]
    for result in run_ranks(build, 4, AXES, [0]):
        for (axes, _), weights in result.items():
            assert weights.keys() == expected.keys()
            assert [name for name in expected if not torch.equal(weights[name], expected[name])] == [], axes


def test_distributions(on_one: dict[int, dict[str, Tensor]]) -> None:
    width, layers, heads, glu = 32, 4, 4, 48
    shapes = {
        "self_attention.kv_proj.weight": (2 * width, width),
        "self_attention.q_proj.weight": (width, width),
        "self_attention.gate_down.weight": (width // heads, width),
        "self_attention.gate_up.weight": (width, width // heads),
        "self_attention.out_proj.weight": (width, width),
        "mlp.linear_fc1.weight": (2 * glu, width),
        "mlp.linear_fc2.weight": (width, glu),
    }
    expected = {f"decoder.layers.{i}.{name}": shape for i in range(layers) for name, shape in shapes.items()}
    expected["embedding.word_embeddings.weight"] = (128, width)
    expected["decoder.layers.0.self_attention.lrpe.theta"] = (heads, width // heads)
    for weights in on_one.values():
        assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected
        for name, tensor in weights.items():
            if name.endswith("theta"):
                angles = [10000 ** (-2 * j / width) for j in range(width)]
                assert tensor.flatten().tolist() == pytest.approx(angles, rel=1e-6)
                continue
            last = name.endswith(("out_proj.weight", "linear_fc2.weight"))
            std = 0.02 / math.sqrt(2 * layers) if last else 0.02
            n = tensor.numel()
            # Five standard errors of the deviation and of the mean.
            assert float(tensor.double().std()) == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name
            assert abs(float(tensor.double().mean())) < 5 * std / math.sqrt(n), name
            assert float(tensor.abs().max()) < 6 * std, name


def test_no_two_tensors_share_a_stream(on_one: dict[int, dict[str, Tensor]]) -> None:
    firsts = [
        tuple((tensor.flatten()[:8] / tensor.flatten()[0]).tolist())
        for weights in on_one.values()
        for name, tensor in weights.items()
        if not name.endswith("theta")
    ]
    assert len(set(firsts)) == len(firsts) == 58


def test_a_seed_gives_these_weights_for_ever(on_one: dict[int, dict[str, Tensor]]) -> None:
    # Not a hash: another processor may round the last bit of a normal number differently.
    golden = {
        "embedding.word_embeddings.weight": [0.0221725237, 0.00288700359, -0.0100647137, -0.0222779159],
        "decoder.layers.2.mlp.linear_fc1.weight": [0.00265039969, -0.0143700419, 0.00748427212, 0.0103999227],
    }
    for name, values in golden.items():
        assert on_one[0][name].flatten()[:4].tolist() == pytest.approx(values, rel=1e-5), name
