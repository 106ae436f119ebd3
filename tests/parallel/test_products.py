"""Which library multiplies matrices of fp32 on a CPU, and that its products stay fp32's."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.evaluation.inference.documents import Documents
from lightscale.parallel.device import products
from lightscale.parallel.device.products import use_onednn_products


@pytest.fixture
def precision() -> Iterator[None]:
    """The process's own is there again behind the test."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


PRODUCTS = """
import sys
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from lightscale.parallel.device.products import use_onednn_products
state = torch.get_rng_state()
use_onednn_products()
assert torch.equal(torch.get_rng_state(), state)
print("precision:", torch.get_float32_matmul_precision(), file=sys.stderr)
generator = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 2, 3, 200, 96, generator=generator).unbind()
ways = {
    "mm": lambda q, k, v: q[0, 0] @ k[0, 0].mT @ v[0, 0],
    "bmm": lambda q, k, v: q @ k.mT @ v,
    "addmm": lambda q, k, v: torch.addmm(q[0, 0, :, :1], q[0, 0], k[0, 0].mT) @ v[0, 0],
    "baddbmm": lambda q, k, v: torch.baddbmm(q[0], q[0] @ k[0].mT, v[0], beta=0.5),
    "linear": lambda q, k, v: linear(linear(q, k[0, 0]), v[0, 0].mT),
    "attention": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
}
for name, way in ways.items():
    found, expected = [], []
    for kept, dtype in ((found, torch.float32), (expected, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        o = way(*leaves)
        kept += [o, *torch.autograd.grad(o, leaves, torch.ones_like(o))]
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 2e-6, name
"""


def test_products_of_fp32_are_onednns_where_they_stay_fp32s() -> None:
    """In a process of its own; oneDNN says which products it computes, and in what precision."""
    environment = os.environ | {"ONEDNN_VERBOSE": "profile_exec", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PRODUCTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=100)
    (precision,) = (line.split()[1] for line in done.stderr.splitlines() if line.startswith("precision: "))
    by_onednn = [line for line in done.stdout.splitlines() if line.startswith("onednn_verbose") and ",matmul," in line]
    has_units = torch.cpu._is_amx_tile_supported()
    if torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_supported() and not has_units:
        assert precision == "medium"
        # Forward and backward of every way, and the product that asks.
        assert len(by_onednn) > 20


@pytest.mark.usefixtures("precision")
def test_products_that_are_no_longer_fp32s_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU whose units multiply bf16."""
    product = torch.Tensor.__matmul__

    def in_bf16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert torch.get_float32_matmul_precision() == "medium"
        return product(a, b) if a.dtype == torch.float64 else product(a.bfloat16(), b.bfloat16()).float()

    monkeypatch.setattr(torch.Tensor, "__matmul__", in_bf16)
    use_onednn_products()
    assert torch.get_float32_matmul_precision() == "highest"
    # What the process has chosen itself stays.
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(products, "_error", lambda: 0.0)
    use_onednn_products()
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.usefixtures("precision")
def test_few_numbers_are_multiplied_by_mkl() -> None:
    """Within the pass alone, however it ends; what is not oneDNN's anyway is left as it is."""
    precision = torch.get_float32_matmul_precision
    for chosen, within in (("medium", "highest"), ("high", "high"), ("highest", "highest")):
        torch.set_float32_matmul_precision(chosen)
        with contextlib.suppress(ZeroDivisionError), products.products_of(4095):
            assert precision() == within
            raise ZeroDivisionError
        assert precision() == chosen
        with products.products_of(4096):
            assert precision() == chosen


@pytest.mark.usefixtures("precision")
def test_prompts_are_read_by_onednn_and_tokens_written_by_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("medium")
    seen: list[tuple[int, str]] = []

    def next_logits(tokens: Tensor, positions: Tensor, states: dict[str, Any]) -> Tensor:
        seen.append((tokens.numel(), torch.get_float32_matmul_precision()))
        states["layer"] = {"kv": torch.zeros(len(tokens), 1)}
        return torch.zeros(len(tokens), 8)

    embedding = SimpleNamespace(word_embeddings=torch.nn.Embedding(8, 128))
    model: Any = SimpleNamespace(embedding=embedding, next_logits=next_logits, give_room=lambda *args: None)
    documents = Documents(model)
    documents.begin([[1] * 40])
    documents.feed([[2]])
    documents.begin([[1] * 40] * 31)
    documents.feed([[2]] * 32)
    assert [one for one in seen if one[0] < 100] == [(40, "medium"), (1, "highest"), (32, "medium")]
