"""The benchmark of checkpoints, on a small state: its ratios are those of its turns, and it saves what it says."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench(tools_path: Path) -> ModuleType:
    """The processes that it starts find it on the path too."""
    return importlib.import_module("benchmarks.checkpoint")


@pytest.mark.long
def test_the_figures_are_those_of_the_turns(
    bench: ModuleType, bench_in_process: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, which prints them as JSON."""
    options = ["--ranks", "2", "--state-mb", "2", "--repeats", "3", "--folder", str(tmp_path)]
    assert bench_in_process.main(["checkpoint", *options, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["benchmark"] == "checkpoint"
    assert figures.keys() > {"machine", "settings"}
    assert all(0.5 * 2_000_000 < size < 2 * 2_000_000 for size in figures["state_bytes"])
    samples = figures["samples_s"]
    for name in ("copy_s", "stall_s", "synchronous_s", "write_s"):
        assert len(samples[name]) == 3
        assert figures[name] == sorted(samples[name])[1] > 0
    ratios = sorted(a / b for a, b in zip(samples["stall_s"], samples["synchronous_s"], strict=True))
    assert figures["stall_to_synchronous"] == pytest.approx(ratios[1])
    assert figures["reached"] == (figures["stall_to_synchronous"] <= 0.3 and figures["stall_to_copy"] <= 2.0)
    assert list(tmp_path.iterdir()) == []
    table = bench.table(figures)
    assert any("stall to synchronous" in str(cell) for column in table.columns for cell in column.cells)


def test_a_wrong_checkpoint_is_an_error(bench: ModuleType, tmp_path: Path) -> None:
    """Started ranks are other processes, so the check is tried in this one."""
    from lightscale.training.build import build_engine
    from lightscale.training.checkpoints.saving import Saver

    settings = bench.CheckpointSettings(ranks=1, state_bytes=200_000)
    config = bench.RunConfig(
        model=bench._model(settings),
        data=bench.DataConfig(store=Path("store"), sequence_length=64),
        optimizer=bench.OptimizerConfig(lr=1e-3),
        train=bench.TrainConfig(steps=1, global_batch_size=1),
    )
    with bench.start_mesh(device="cpu", init_method=f"file://{tmp_path}/rendezvous") as mesh:
        engine = build_engine(config, mesh, vocab_size=config.model.vocab_size, trainable=True)
        Saver(tmp_path / "checkpoints", mesh).save(engine, step=1, common={}, facts={})
        with pytest.raises(RuntimeError, match="the checkpoint differs from the state at the beginning of the save"):
            bench._check(engine, mesh, tmp_path / "checkpoints", 1)
