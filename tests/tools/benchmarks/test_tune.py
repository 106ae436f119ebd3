"""The search for tiles: what it tries, keeps and says, by times that are made up; and that launches read the tiles."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightscale.kernels.delta_rule import delta_rule
from lightscale.kernels.gla import gla
from lightscale.kernels.lightnet import lightnet_attention
from lightscale.kernels.lightning import lightning_attention

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tools(tools_path: Path) -> SimpleNamespace:
    """The modules of the tool, which import each other from their folder."""
    import bench
    from benchmarks import gpu_kernels, subjects, tune

    return SimpleNamespace(bench=bench, kernels=gpu_kernels, subjects=subjects, tune=tune)


def tiles_of(operator: str) -> Any:
    return import_module(f"lightscale.kernels.{operator}.triton.tiling")


def bench_of(tools: SimpleNamespace, ms: Callable[[], float]) -> Any:
    """A bench whose work takes as long as ``ms`` says at that moment."""
    here = tools.subjects.Setting(device=torch.device("cpu"), dtype=torch.float16, num_heads=1, width=8)
    timer = SimpleNamespace(samples_ms=lambda work, repeats, *, compiled: [ms()] * repeats)
    rates = tools.kernels.Rates(copy_bytes_per_s=1e9, matmul_flops=1e9)
    return tools.kernels.Bench(setting=here, timer=timer, rates=rates, repeats=1)


def made_up_ms() -> float:
    """Half of the time by one change of gla's tiles, a tenth more by another behind it; lightnet's are all noise."""
    gla_tiles, lightnet_tiles = tiles_of("gla")._HALF, tiles_of("lightnet")._HALF
    if gla_tiles.gradient_value == 128:
        raise RuntimeError("out of resource: shared memory")
    ms = 1.0
    if gla_tiles.gradient_stages == 2:
        ms *= 0.5
    if gla_tiles.width == 128:
        ms *= 0.9 if gla_tiles.gradient_stages == 2 else 2.0
    if gla_tiles.state_key == 128:
        ms *= 3.0
    if lightnet_tiles.chunk == 256:
        ms *= 0.99
    return ms


def test_the_best_tiles_are_found_and_the_shipped_ones_are_back(tools: SimpleNamespace) -> None:
    shipped = {operator: tiles_of(operator)._HALF for operator in tools.tune.SEARCHES}
    steps = list(tools.tune.tune(bench_of(tools, made_up_ms), tokens=10))
    found = steps[-1]
    assert found.keys() == {"lightning", "gla", "lightnet", "delta_rule"}
    assert len(steps) == sum(1 + len(search.changes) for search in tools.tune.SEARCHES.values())
    assert found["gla"]["best"] == {"gradient_stages": 2, "width": 128}
    # 1 ms for 10 tokens of one head, forward and with backward.
    assert found["gla"]["tried"][0]["total_ns"] == pytest.approx(2e5)
    assert found["gla"]["best_ns"] == pytest.approx(0.9e5)
    # A change that does not run, or gains nothing but noise, is said and not kept.
    failed = next(trial for trial in found["gla"]["tried"] if trial["changes"] == {"gradient_value": 128})
    assert failed["total_ns"] is None
    assert "shared memory" in failed["ns"]["decay per channel"]["forward"]
    assert found["lightning"]["best"] == found["lightnet"]["best"] == {}
    assert {operator: tiles_of(operator)._HALF for operator in shipped} == shipped
    lines = list(tools.tune.said(found))
    assert "tiles of gla, gradient_value 128: did not run" in lines
    assert "best tiles of gla: gradient_stages 2, width 128, 2.22 times as fast as shipped" in lines
    assert "best tiles of lightnet: as shipped" in lines


def test_where_nothing_runs_nothing_is_best(tools: SimpleNamespace) -> None:
    def broken() -> float:
        raise RuntimeError("no such instruction")

    *_, found = tools.tune.tune(bench_of(tools, broken), tokens=10)
    assert found["lightnet"]["best"] is None
    assert "best tiles of lightnet: none runs" in list(tools.tune.said(found))


def test_what_is_tried_differs_from_what_is_shipped(tools: SimpleNamespace) -> None:
    names = {subject.name for subject in tools.subjects.subjects(bench_of(tools, float).setting, with_fla=False)}
    for operator, search in tools.tune.SEARCHES.items():
        assert set(search.subjects) <= names
        shipped = asdict(tiles_of(operator)._HALF)
        for change in search.changes:
            assert all(shipped[name] != value for name, value in change.items()), (operator, change)


def test_it_is_saved_and_printed(
    tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"gla": {"tried": [{"changes": {}, "ns": {}, "total_ns": 3.0}], "best": {}, "best_ns": 3.0}}
    monkeypatch.setattr(tools.tune, "check_device", lambda: None)
    monkeypatch.setattr(tools.tune, "tune", lambda bench: iter([found]))
    arguments = ["kernels", "--tune", "--repeats", "1", "--shapes", "1x16"]
    assert tools.bench.main([*arguments, "--json"]) == 0
    assert '"tiles": {"gla": {"tried"' in capsys.readouterr().out
    assert tools.bench.main(arguments) == 0
    assert "best tiles of gla: as shipped" in capsys.readouterr().out


class Recorder:
    """In place of a kernel: what it is launched with."""

    def __init__(self, launches: list[Any]) -> None:
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **options: self._launches.append((grid, sorted(options.items(), key=lambda x: x[0])))


OPERATORS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "lightning": (lightning_attention, ("scan_states", "attend", "fold_splits")),
    "gla": (gla, ("prepare", "scan_states", "attend", "fold_splits", "gradients")),
    "lightnet": (
        lightnet_attention,
        ("scan_states", "weigh", "outputs", "query_gradients", "scan_cotangents", "key_gradients", "value_gradients"),
    ),
    "delta_rule": (
        delta_rule,
        ("prepare_heads", "prepare_channels", "scan_forward", "scan_back", "gradients_heads", "gradients_channels"),
    ),
}


def calls_of(operator: str) -> Iterator[tuple[list[torch.Tensor], dict[str, Any]]]:
    """Tensors and options of each call."""
    if operator == "delta_rule":
        # Wide keys leave a tile of the state few columns, and narrow ones as many as it may have.
        for width in (64, 256):
            q, k, v = (torch.ones(1, 600, 1, width) for _ in range(3))
            beta = torch.ones(1, 600, 1)
            yield [q, k, v, -beta, beta], {}
            yield [q, k, v, -torch.ones_like(k), beta], {}
        return
    leaves = [torch.ones(1, 600, 1, 512) for _ in range(3)]
    if operator == "gla":
        leaves.append(-torch.ones_like(leaves[0]))
    yield leaves, {}
    if operator == "lightning":
        angle = import_module("lightscale.kernels.common.angles").Angles
        yield leaves, {"angles": angle(torch.ones(1, 512), torch.arange(600)[None])}


def launches_of(operator: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of forward and backward passes in each form, at widths and lengths that every tile cuts."""
    run, kernels = OPERATORS[operator]
    passes, launches = import_module(f"lightscale.kernels.{operator}.triton.passes"), list[Any]()
    for kernel in kernels:
        monkeypatch.setattr(passes, kernel, Recorder(launches))
    for tensors, options in calls_of(operator):
        leaves = [x.clone().requires_grad_() for x in tensors]
        o, _ = run(*leaves, backend="triton", **options)
        torch.autograd.grad(o.sum(), leaves)
    return launches


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_tile_reaches_a_launch(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that no launch reads would be tuned in vain."""
    tiles = tiles_of(operator)
    shipped = tiles._FULL
    usual = launches_of(operator, monkeypatch)
    assert usual
    for field in fields(shipped):
        value = getattr(shipped, field.name)
        if not isinstance(value, int):
            continue
        monkeypatch.setattr(tiles, "_FULL", replace(shipped, **{field.name: 2 * value}))
        assert launches_of(operator, monkeypatch) != usual, field.name
        monkeypatch.setattr(tiles, "_FULL", shipped)
