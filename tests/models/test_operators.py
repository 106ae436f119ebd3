"""Which back-end of each operator a model uses, by device or as train.kernels says; and what reads the descriptions."""

from collections.abc import Iterator
from math import prod

import pytest
import torch

from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.kernels.common.backends import set_default_backend
from lightscale.kernels.operators import CostClass
from lightscale.models.operators import describe_operators
from lightscale.models.registry import mixer_spec
from lightscale.models.specs.tnl import TNLSpec
from lightscale.models.specs.tpe import TPESpec
from lightscale.planning.workload import Workload

REST = "norm chunked, glu chunked, cross_entropy chunked"


@pytest.fixture
def setting() -> Iterator[None]:
    yield
    set_default_backend("auto")


def shape(mixer: str | list[str]) -> ModelConfig:
    return ModelConfig(mixer=mixer, num_layers=2, hidden_size=64, num_heads=4, intermediate_size=96, vocab_size=128)


def describe(mixer: str | list[str], dtype: torch.dtype = torch.float32) -> str:
    return describe_operators(shape(mixer), dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("mixer", "operators"),
    [
        ("tnl", "lightning chunked, heads chunked"),
        ("hgrn2", "gla chunked, forget_gate chunked, heads chunked"),
        ("cosformer2", "lightning chunked, tpe chunked"),
        ("lightnet", "lightnet chunked, heads chunked, tpe chunked"),
        ("llama", "SDPA PyTorch, heads chunked"),
        (["hgrn2", "llama"], "gla chunked, SDPA PyTorch, forget_gate chunked, heads chunked"),
    ],
)
def test_each_operator_is_named_once_with_what_computes_it(mixer: str | list[str], operators: str) -> None:
    assert describe(mixer) == f"kernels: {operators}, {REST}"


@pytest.mark.usefixtures("setting")
def test_the_setting_is_for_all_of_them() -> None:
    set_default_backend("reference")
    assert describe("lightnet").count("reference") == 6
    set_default_backend("triton")
    with pytest.raises(UserError, match="supports fp16, bf16 and fp32, not torch"):
        describe("tnl", torch.float64)


@pytest.mark.parametrize("mixer", ["tnl", ["hgrn2", "tnl"]], ids=["alone", "hybrid"])
def test_an_operator_that_nobody_described_is_refused(mixer: str | list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log and in what planning computes from."""
    monkeypatch.setattr(TNLSpec, "operator", "delta")
    with pytest.raises(
        UserError, match=r"no operator 'delta'; use one of .*gla, glu, heads, lightnet, lightnet_noncausal, lightning"
    ):
        describe(mixer)
    work = Workload(shape(mixer), 128)
    with pytest.raises(
        UserError, match=r"no operator 'delta'; use one of .*gla, glu, heads, lightnet, lightnet_noncausal, lightning"
    ):
        _ = work.layers


def test_a_cost_class_that_planning_has_no_speed_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TNLSpec, "operator", "norm")
    with pytest.raises(UserError, match=r"mixer 'tnl': operator 'norm' has cost class 'memory'.* scan, gated_scan"):
        _ = Workload(shape("tnl"), 128).layers


@pytest.mark.parametrize(
    ("mixer", "cost", "has_state"),
    [
        ("tnl", CostClass.SCAN, True),
        ("hgrn2", CostClass.GATED_SCAN, True),
        ("cosformer2", CostClass.SCAN, True),
        ("lightnet", CostClass.SCAN, True),
        ("llama", CostClass.SOFTMAX, False),
    ],
)
def test_planning_reads_the_description(mixer: str, cost: CostClass, has_state: bool) -> None:
    layers = Workload(shape(mixer), 128).layers
    assert {(layer.cost, layer.has_state) for layer in layers} == {(cost, has_state)}


@pytest.mark.parametrize(
    ("mixer", "chunk", "halves"), [("tnl", 128, 1), ("hgrn2", 64, 1), ("cosformer2", 128, 2), ("lightnet", 128, 2)]
)
def test_flops_are_counted_with_the_chunk_of_the_kernel(mixer: str, chunk: int, halves: int) -> None:
    """4 heads of 16: 2 C (k + v) in the chunk and 4 k v with the state. LRPE doubles k, in TNL on the first layer."""
    model, k, v = shape(mixer), halves * 16, 16
    for length, used in ((8192, chunk), (48, 48)):
        shapes = mixer_spec(mixer).parameter_shapes(model, 1)
        products = sum(2 * prod(shapes[name]) for name in shapes if name.endswith(".weight"))
        expected = products + 4 * (2 * used * (k + v) + 4 * k * v)
        assert mixer_spec(mixer).forward_flops_per_token(model, 1, length) == expected


def test_flops_of_the_positional_encoding() -> None:
    """d 64 and 16 modes: a Toeplitz product of the kernel's 16 tokens, and the state read and written."""
    assert TPESpec.forward_flops_per_token(shape("lightnet")) == 64 * (2 * 16 + 4 * 16)
