"""``tools/bench.py train``: what it measures is a whole training step; recomputation follows memory; targets."""

import argparse
import json
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightscale.config.files import load
from lightscale.models.flops import training_flops_per_token

ROOT = Path(__file__).resolve().parents[3]
CONFIG = str(ROOT / "configs" / "tnl-tiny.toml")
SHAPE = [CONFIG, "--lengths", "256", "64", "--tokens-per-step", "512", "--micro-batch-tokens", "256"]


@pytest.fixture(scope="module")
def tool(tools_path: Path) -> ModuleType:
    import bench

    return bench.train


def run(*arguments: str) -> int:
    code: int = sys.modules["bench"].main(["train", *arguments])
    return code


@pytest.mark.long
@pytest.mark.usefixtures("tool")
def test_figures_of_every_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SHAPE, "--repeats", "2", "--json", "--save", str(tmp_path)) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert figures["settings"] == {"config": CONFIG, "tokens_per_step": 512}
    assert list(figures["lengths"]) == ["64", "256"]
    for length, micro in ((64, 4), (256, 1)):
        found = figures["lengths"][str(length)]
        model = load(ROOT / "configs" / "tnl-tiny.toml", [f"data.sequence_length={length}"]).model
        assert found["micro_batch_size"] == micro
        assert found["recompute"] == "none"
        assert found["flops_per_token"] == training_flops_per_token(model, length)
        assert found["tokens_per_s"] == pytest.approx(512 / found["step_s"])
        assert len(found["samples_s"]) == 2
        # Of the process that measured: torch and a tiny model.
        assert 50 << 20 < found["peak_memory_bytes"] < 4 << 30
        assert found["mfu"] is None  # the peak of a CPU is not known
    assert figures["lengths"]["64"]["ratio"] == 1.0
    assert figures["verdict"] == {"targets": None, "missed": []}
    (saved,) = tmp_path.iterdir()
    assert json.loads(saved.read_text()) == figures | {"complete": True}


@pytest.mark.usefixtures("tool")
def test_a_length_that_does_not_divide_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(CONFIG, "--lengths", "96", "--tokens-per-step", "512") == 78
    assert "--tokens-per-step 512 is not divisible by the length 96" in capsys.readouterr().err


def row(tokens_per_s: float, *, recompute: str = "none", mfu: float = 0.6) -> dict[str, Any]:
    return {"device": "NVIDIA H200", "recompute": recompute, "tokens_per_s": tokens_per_s, "mfu": mfu}


def sweep(tool: ModuleType, fits: dict[str, int], *lengths: int, recompute: str = "auto") -> tuple[Any, list[Any]]:
    """Figures of a made-up device on which lengths up to ``fits[level]`` fit; and what was tried."""
    tried: list[Any] = []

    def measure(case: Any) -> dict[str, Any]:
        tried.append((case.length, case.recompute))
        if case.length > fits[case.recompute]:
            raise torch.cuda.OutOfMemoryError if case.recompute == "none" else BrokenProcessPool
        speed = {"none": 100.0, "selective": 90.0, "full": 75.0}[case.recompute]
        return row(speed - case.length / 2**19, recompute=case.recompute)

    settings = tool.TrainSettings(
        config_path="configs/tnl-1b.toml", tokens_per_step=2**19, micro_batch_tokens=1, steps=1
    )
    *_, figures = tool.run(settings, lengths, recompute=recompute, measure_one=measure)
    return figures, tried


def test_what_does_not_fit_is_recomputed_and_compared_with_its_like(tool: ModuleType) -> None:
    figures, tried = sweep(tool, {"none": 2**14, "selective": 2**14, "full": 2**19}, 2**12, 2**13, 2**17, 2**19)
    assert tried == [
        (2**12, "none"), (2**13, "none"), (2**17, "none"), (2**17, "selective"), (2**17, "full"), (2**13, "full"),
        (2**19, "full"),
    ]  # fmt: skip
    assert [failure["reason"] for failure in figures["failures"]] == ["OutOfMemoryError", "BrokenProcessPool"]
    longest = figures["lengths"][2**19]
    of_reference = 2**13 / 2**19
    assert longest["ratio"] == pytest.approx(74 / (100 - of_reference))
    assert longest["ratio_at_same_recompute"] == pytest.approx(74 / (75 - of_reference))
    assert figures["lengths"][2**13]["ratio"] == figures["lengths"][2**13]["ratio_at_same_recompute"] == 1.0
    assert figures["verdict"]["missed"] == ["tokens/s at 524288: 0.740 of those at 8192, target 0.95"]


def test_what_never_fits_is_missed(tool: ModuleType) -> None:
    figures, tried = sweep(tool, {"none": 2**14}, 2**13, 2**17, 2**19, recompute="none")
    assert tried == [(2**13, "none"), (2**17, "none")]
    assert figures["verdict"]["missed"] == ["131072 tokens do not fit in memory", "524288 tokens do not fit in memory"]


def test_targets(tool: ModuleType) -> None:
    """Half of the peak at 8K, and 0.95 of its tokens/s at 512K: for the 1B TNL on an H200."""
    good = {8192: row(100.0, mfu=0.5) | {"ratio": 1.0}, 2**19: row(95.0) | {"ratio": 0.95}}
    figures: dict[str, Any] = {"config": "configs/tnl-1b.toml", "reference_length": 8192, "failures": []}
    assert tool.judge(figures | {"lengths": good}) == {"targets": {"mfu": 0.5, "ratio": 0.95}, "missed": []}
    bad = {8192: row(100.0, mfu=0.49), 2**19: row(94.0) | {"ratio": 0.94}}
    assert tool.judge(figures | {"lengths": bad})["missed"] == [
        "MFU at 8192: 0.490, target 0.5",
        "tokens/s at 524288: 0.940 of those at 8192, target 0.95",
    ]
    assert tool.judge(figures | {"lengths": bad, "config": "configs/llama-1b.toml"})["targets"] is None
    elsewhere = {length: one | {"device": "NVIDIA A100"} for length, one in bad.items()}
    assert tool.judge(figures | {"lengths": elsewhere}) == {"targets": None, "missed": []}


def test_fp8_beside_bf16(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A way that does not fit at any recomputation is named in the verdict, which `make gpu-check` reads."""
    del capsys
    parser = argparse.ArgumentParser()
    tool.fp8_arguments(parser)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args([CONFIG, "--length", "64", "--tokens-per-step", "128"])

    def measure(case: Any) -> dict[str, Any]:
        if case.fp8 == "current":
            raise torch.cuda.OutOfMemoryError
        return {"tokens_per_s": 1000.0, "recompute": case.recompute}

    first, both = tool.run_fp8(args, measure)
    assert first["verdict"] == {"missed": []}
    assert first["none"]["tokens_per_s"] == 1000.0
    assert set(both["verdict"]["missed"]) == {"train.fp8 = current: OutOfMemoryError"}
