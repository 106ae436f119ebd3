"""Which form of each operator a model uses: by device, or as train.kernels says."""

from collections.abc import Iterator

import pytest
import torch

from lightscale.config.schema import ModelConfig
from lightscale.errors import UserError
from lightscale.kernels.common.backends import set_default_backend
from lightscale.models.operators import describe_operators

REST = "norm chunked, glu chunked, cross_entropy chunked"


@pytest.fixture
def setting() -> Iterator[None]:
    yield
    set_default_backend("auto")


def describe(mixer: str | list[str], dtype: torch.dtype = torch.float32) -> str:
    model = ModelConfig(mixer=mixer, num_layers=2, hidden_size=64, num_heads=4, intermediate_size=96, vocab_size=128)
    return describe_operators(model, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("mixer", "operators"),
    [
        ("tnl", "lightning chunked"),
        ("hgrn2", "gla chunked"),
        ("cosformer2", "lightning chunked, tpe chunked"),
        ("lightnet", "lightnet chunked, tpe chunked"),
        ("llama", "SDPA PyTorch"),
        (["hgrn2", "llama"], "gla chunked, SDPA PyTorch"),
    ],
)
def test_each_operator_is_named_once_with_what_computes_it(mixer: str | list[str], operators: str) -> None:
    assert describe(mixer) == f"kernels: {operators}, {REST}"


@pytest.mark.usefixtures("setting")
def test_the_setting_is_for_all_of_them() -> None:
    set_default_backend("reference")
    assert describe("lightnet").count("reference") == 5
    set_default_backend("triton")
    with pytest.raises(UserError, match="computes fp16, bf16 and fp32, not torch"):
        describe("tnl", torch.float64)
