"""``tools/bench.py cpu-training``: its figures, models of one shape, and its targets."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from lightscale.models.accounting import parameter_terms


@pytest.fixture(scope="module")
def tool(tools_path: Path) -> ModuleType:
    import bench

    return bench.cpu_training


@pytest.mark.usefixtures("tool")
def test_figures_of_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cpu-training", "--size", "tiny", "--lengths", "64", "--models", "tnl", "--repeats", "1", "--json"]
    assert sys.modules["bench"].main(arguments) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    other, *own = figures["lines"]
    assert [line["model"] for line in figures["lines"]] == ["transformers LLaMA", "tnl", "tnl, by MKL"]
    assert other["times_transformers"] == 1
    assert all(line["times_transformers"] == line["tokens_per_cpu_s"] / other["tokens_per_cpu_s"] for line in own)
    for line in figures["lines"]:
        assert line["tokens_per_step"] == 2048
        assert line["tokens_per_cpu_s"] == pytest.approx(2048 / line["samples_s"][0])
        assert 0.02 < line["share_of_products"] < 0.98
        bound = line["times_transformers"] / line["share_of_products"]
        assert line["times_with_products_alone"] == pytest.approx(bound)
    assert figures["verdict"]["missed"] == [], "targets are for the size 3M"


def test_products_are_told_from_other_work(tool: ModuleType) -> None:
    """Forward and backward, of matrices alone and of attention."""
    x = torch.randn(4, 4, 128, 128, requires_grad=True)

    def products() -> None:
        (torch.nn.functional.scaled_dot_product_attention(x @ x, x, x, is_causal=True) @ x).sum().backward()

    assert tool.share_of_products(products) > 0.6
    assert tool.share_of_products(lambda: x.detach().exp().sum().item()) == 0


def test_llamas_have_one_shape(tool: ModuleType) -> None:
    model = tool.Shape(size="3M", length=512).config("llama").model
    other = LlamaForCausalLM(tool.llama_config(model, 512))
    assert sum(parameter.numel() for parameter in other.parameters()) == sum(parameter_terms(model).values())


def test_missed_targets_are_named(tool: ModuleType) -> None:
    lines = [
        {"model": "llama", "length": 512, "times_transformers": 1.1},
        {"model": "tnl", "length": 8192, "times_transformers": 3.25},
        {"model": tool.OTHER, "length": 512, "times_transformers": 1.0},
        {"model": f"tnl{tool.BY_MKL}", "length": 8192, "times_transformers": 1.0},
    ]
    assert tool.missed(lines, "3M") == ["tnl at 8192: 3.25 times, target 3.5"]
