"""The benchmark of conversion: both starts are trained alike, and where a converted model is behind is named."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightscale.config.files import load


@pytest.fixture(scope="module")
def convert(tools_path: Path) -> ModuleType:
    return importlib.import_module("benchmarks.learning.convert")


def test_pairs_are_trained_alike_and_drawn(
    convert: ModuleType, bench_in_process: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the training: each run leaves the losses that its name asks for."""
    commands: dict[str, dict[str, str]] = {}

    def trained(*words: str) -> None:
        run = Path(words[words.index("--run") + 1])
        overrides = [word for word in words[2:] if "=" in word]
        load(Path(words[1]), overrides)
        commands[run.name] = dict(word.split("=", 1) for word in overrides)
        # TNL's converted model is ahead but for the last validation, HGRN2's always.
        last = 6.0 if run.name == "tnl-converted-1" else 4.0 if "converted" in run.name else 5.0
        run.mkdir()
        lines = [{"step": step, "attempt": 1, "tokens": 1024 * step, "loss": 4.0} for step in (1, 2)]
        for line, loss in zip(lines, (1.0 if "converted" in run.name else 2.0, last), strict=True):
            line |= {"validation": {"stdlib": {"loss": loss, "loss_by_position": [loss]}}}
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(convert, "run_lightscale", trained)
    words = ["convert", "--store", str(tmp_path), "--steps", "30", "--save", str(tmp_path)]
    assert bench_in_process.main(words) == 0
    (path,) = tmp_path.glob("convert_*.json")
    figures: dict[str, Any] = json.loads(path.read_text())
    assert figures["verdict"]["missed"] == ["tnl, seed 1: the converted model is not ahead after 2048 tokens"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert [(one["mixer"], one["start"]) for one in figures["runs"]] == [
        (mixer, start) for mixer in ("tnl", "hgrn2") for start in ("converted", "from nothing")
    ]
    for mixer in ("tnl", "hgrn2"):
        one, other = commands[f"{mixer}-converted-1"], commands[f"{mixer}-nothing-1"]
        assert one.pop("train.init_from").endswith("llama@400")
        assert one == other and one["model.mixer"] == mixer
