"""Dropout of adapters: draws against the hash in NumPy, gradients against hooks with these draws, on every axis."""

import dataclasses
import runpy
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lightscale.config.schema import AdapterConfig
from lightscale.models import dropout
from lightscale.models.adapters import LinearMap, adapted_maps
from lightscale.models.dropout import Dropout
from lightscale.models.language_model import language_model_chunks, transformer_config
from lightscale.models.low_rank import add_adapters
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import draw_weights, named_parameters
from lightscale.parallel.mesh import Mesh
from lightscale.training.optimizer.adamw import AdamW

TESTS = Path(__file__).parents[1]
parity = SimpleNamespace(**runpy.run_path(str(TESTS / "helpers" / "parity.py")))
forms = SimpleNamespace(**runpy.run_path(str(TESTS / "models" / "test_low_rank.py")))
RunRanks = Callable[..., list[Any]]
ADAPTER = AdapterConfig(name="lora", r=3, lora_alpha=5.0, lora_dropout=0.3)
SEED = 7
# Beyond 32 bits.
FIRST_PLACE = 5 * 2**33


def hashed(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    values = values.astype(np.uint32)
    values ^= values >> np.uint32(16)
    values *= np.uint32(0x7FEB352D)
    values ^= values >> np.uint32(15)
    values *= np.uint32(0x846CA68B)
    return values ^ (values >> np.uint32(16))


def factors(name: str, places: list[int], tokens: int, columns: int) -> NDArray[np.float64]:
    """(tokens, rows, columns), 0 or 1 / (1 - p)."""
    key = np.uint32(zlib.crc32(f"{SEED} {name}".encode()))
    rows = np.array([[place >> 32, place % 2**32] for place in places], dtype=np.uint32)
    of_rows = hashed(hashed(rows[:, 0] ^ key) ^ rows[:, 1])
    of_tokens = hashed(of_rows[None, :] ^ hashed(np.arange(tokens, dtype=np.uint32))[:, None])
    of_columns = hashed(np.arange(columns, dtype=np.uint32) ^ np.uint32(0x9E3779B9))
    kept = hashed(of_tokens[:, :, None] ^ of_columns) >= round(ADAPTER.lora_dropout * 2**32)
    return kept / (1 - ADAPTER.lora_dropout)


def test_draws_are_the_hash_wherever_a_part_begins() -> None:
    places = [0, 96, FIRST_PLACE + 96]
    expected = factors("layers.0.mixer.q", places, 64, 48)
    drop = Dropout(ADAPTER.lora_dropout, seed=SEED, name="layers.0.mixer.q")
    x = torch.randn(64, 3, 48, dtype=torch.float64)
    whole = drop(x, torch.tensor(places), 0, 0)
    assert torch.equal(whole, x * torch.from_numpy(expected))
    part = drop(x[10:30, 1:, 16:], torch.tensor(places[1:]), 10, 16)
    assert torch.equal(part, whole[10:30, 1:, 16:])


def test_draws_in_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, places = torch.randn(65, 3, 48), torch.tensor([0, 96, FIRST_PLACE])
    expected = Dropout(0.3, seed=SEED, name="a")(x, places, 7, 5)
    # No multiple of 65 tokens, and fewer numbers than one token has.
    for numbers in (1000, 10):
        monkeypatch.setattr(dropout, "_NUMBERS_AT_ONCE", numbers)
        assert torch.equal(Dropout(0.3, seed=SEED, name="a")(x, places, 7, 5), expected)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.2, 0.3])
def test_mean_in_bf16_is_that_of_the_input(p: float) -> None:
    """A factor rounded to bf16 would be off to one side: by 0.27 % at p = 0.05, 0.44 % at 0.1."""
    n, b, columns = 2048, 4, 256
    x = (1 + torch.rand(n, b, columns, generator=torch.Generator().manual_seed(0))).bfloat16()
    dropped = Dropout(p, seed=SEED, name="a")(x, torch.arange(b) * n, 0, 0)
    assert dropped.dtype == torch.bfloat16
    # Of those that are kept, so that the share itself, whose spread is larger, does not count.
    kept = dropped != 0
    ratio = float(dropped[kept].double().mean() / x[kept].double().mean())
    assert ratio == pytest.approx(1 / (1 - p), rel=2e-4)


def test_draws_have_the_share_and_no_correlation() -> None:
    kept = Dropout(0.3, seed=SEED, name="a").kept(torch.empty(256, 4, 128), torch.arange(4) * 256, 0, 0).double()
    # Five standard deviations of a binomial's share.
    assert abs(kept.mean() - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    other = Dropout(0.3, seed=SEED, name="b").kept(torch.empty(256, 4, 128), torch.arange(4) * 256, 0, 0).double()
    centred = kept - 0.7
    for two in (other - 0.7, centred.roll(1, 0), centred.roll(1, 1), centred.roll(1, 2)):
        assert abs((centred * two).mean()) < 5 * 0.21 / kept.numel() ** 0.5


def batches_of(mesh: Mesh, case: Any) -> list[Any]:
    found = []
    for number, batch in enumerate(parity.step_batches(0, mesh, case)):
        rows = len(batch.labels)
        first = (mesh.data_rank + number * mesh.data) * rows
        places = FIRST_PLACE + parity.TOKENS * torch.arange(first, first + rows)
        found.append(dataclasses.replace(batch, places=places))
    return found


def hooked(layer: Any, linear: LinearMap, a: Tensor, b: Tensor, places: list[list[int]]) -> None:
    """Add what the adapter gives, with the draws of the micro-batches in their order; behind them without any."""
    rows, turns = torch.cat([torch.arange(first, last) for first, last in linear.ranges]), iter(places)

    def hook(_: Any, args: tuple[Tensor, ...], output: Any) -> Any:
        y, *rest = output if isinstance(output, tuple) else (output,)
        x = args[0]
        if (rows_here := next(turns, None)) is not None:
            x = x * torch.from_numpy(factors(linear.name, rows_here, x.size(0), x.size(2)))
        change = F.linear(F.linear(x, a), b) * (ADAPTER.lora_alpha / ADAPTER.r)
        y = y.index_add(2, rows, change)
        return (y, *rest) if isinstance(output, tuple) else y

    layer.register_forward_hook(hook)


def record(rank: int, world_size: int, init_method: str, path: str, names: list[str]) -> None:
    """Weights, adapters and their gradients with hooks on a model of one process that knows no adapters."""
    found = {}
    for name, case, mesh in parity.on_meshes(names, rank, world_size, init_method):
        with parity.engine_in(mesh, case, torch.float64) as engine:
            frozen, batches = parity.disturbed(engine), batches_of(mesh, case)
            parity.set_weights(engine, frozen)
            places = [batch.places.tolist() for batch in batches]
            (chunk,) = engine.chunks
            owners = {id(one): module for module in chunk.modules() for one in module.parameters(recurse=False)}
            layers = {key: owners[id(one)] for key, one in named_parameters(chunk)}
            values = {}
            for linear in adapted_maps(parity.MODELS[name], ADAPTER):
                own = {key: one.requires_grad_() for key, one in forms.values_of(linear, ADAPTER).items()}
                hooked(layers[linear.weight], linear, *own.values(), places)
                values |= own
            batches = [dataclasses.replace(batch, places=None) for batch in batches]
            sums = engine.forward_backward(batches)
            expected = {key: (one.detach(), one.grad / sums.tokens) for key, one in values.items()}
            found[name] = (frozen, expected, sums.mean, engine.forward_only(batches).mean)
    torch.save(found, path)


def adapted_engine(mesh: Mesh, case: Any) -> Engine:
    model = parity.MODELS[case.model]
    config = transformer_config(
        model, mesh, torch.float64, recompute=case.recompute, recompute_layers=case.recompute_layers
    )
    chunks = language_model_chunks(config, model, vocab_size=parity.VOCAB_SIZE, mesh=mesh)
    add_adapters(chunks, ADAPTER, seed=SEED)
    for chunk in chunks:
        draw_weights(chunk, seed=0, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
    return Engine(chunks, config, mesh, optimizer=AdamW(), position_buckets=4)


def compare(rank: int, world_size: int, init_method: str, path: str, cases: list[str]) -> dict[str, dict[str, float]]:
    recorded, found = torch.load(path, weights_only=False), {}
    for layout, case, mesh in parity.on_meshes(cases, rank, world_size, init_method):
        frozen, expected, loss, validated = recorded[case.model]
        engine, batches = adapted_engine(mesh, case), batches_of(mesh, case)
        parity.set_weights(engine, {**frozen, **{name: value for name, (value, _) in expected.items()}})
        errors = {"loss": abs(engine.forward_backward(batches).mean - loss)}
        for name, gradient in parity.gradients(engine).items():
            errors[name] = parity.error(gradient, expected[name][1])
        # Nothing is dropped in validation.
        assert abs(validated - loss) > 1e-6
        errors["validated"] = abs(engine.forward_only(batches).mean - validated)
        found[layout] = errors
    return found


def check(run_ranks: RunRanks, tmp_path: Path, layouts: dict[int, list[str]]) -> None:
    path = str(tmp_path / "recorded.pt")
    run_ranks(record, 1, path, sorted({case.split()[0] for some in layouts.values() for case in some}), timeout_s=300)
    recorded = torch.load(path, weights_only=False)
    for world_size, cases in layouts.items():
        of_ranks = run_ranks(compare, world_size, path, cases, timeout_s=600)
        for errors in of_ranks:
            for case, of_case in errors.items():
                assert max(of_case.values()) < 1e-10, f"{case}: {of_case}"
        for case in cases:
            compared = set().union(*(errors[case] for errors in of_ranks))
            assert compared == {*recorded[case.split()[0]][1], "loss", "validated"}, f"{case}: on all stages together"


def test_every_axis_has_the_gradients_of_the_draws(run_ranks: RunRanks, tmp_path: Path) -> None:
    check(run_ranks, tmp_path, {1: ["tnl"], 2: ["tnl tensor=2", "hybrid sequence=2 recompute=selective"]})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_axis_has_the_gradients_of_the_draws_with_recomputation(run_ranks: RunRanks, tmp_path: Path) -> None:
    layouts = {
        2: ["hybrid pipeline=2 recompute=full", "gated-delta-net"],
        4: [
            *["hybrid tensor=2 sequence=2 recompute=full", "tnl tensor=2 pipeline=2 recompute=selective"],
            *["gated-delta-net tensor=2 sequence=2", "kimi-delta tensor=2 pipeline=2 virtual_stages=2 recompute=full"],
        ],
    }
    check(run_ranks, tmp_path, layouts)
