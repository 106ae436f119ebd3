"""The benchmarks of digits: what is asked of each run, and all of it at small sizes."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from lightscale.config.files import load


@pytest.fixture(scope="module")
def digits(tools_path: Path) -> ModuleType:
    return importlib.import_module("benchmarks.learning.digits")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Squares whose shade is their class."""
    labels = np.arange(120) % 10
    shades = np.broadcast_to(labels[:, None, None] * 25, (120, 8, 8)) + np.arange(120)[:, None, None] % 7
    np.savez(tmp_path / "images.npz", images=shades.astype(np.uint8), labels=labels)
    return tmp_path / "images.npz"


def test_models_have_about_equal_parameters(digits: ModuleType, tmp_path: Path) -> None:
    sizes = []
    for name in digits.CLASSIFIERS:
        path = tmp_path / name
        path.mkdir()
        (path / "config.toml").write_text(f'extends = "{name}"\n', encoding="utf-8")
        sizes.append(digits._parameters(str(path)))
    assert max(sizes) < 1.06 * min(sizes)
    drawn = [f'extends = ["{part}", "size/dit-digits", "recipe/draw-digits"]\n' for part in digits.DRAWN.values()]
    for number, text in enumerate(drawn):
        if '"arch/' in text:
            (tmp_path / f"{number}.toml").write_text(text, encoding="utf-8")
            assert load(tmp_path / f"{number}.toml").task.name == "diffusion"


def test_without_the_images_it_says_what_to_install(
    bench_in_process: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "sklearn", None)
    assert bench_in_process.main(["digits", "--folder", str(tmp_path / "kept")]) == 78
    assert "pip install scikit-learn" in capsys.readouterr().err


@pytest.mark.long
def test_whole_at_small_sizes(
    bench_in_process: ModuleType, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every model is trained, measured and drawn, also where the folder to save to is relative."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    common = ["--images", str(images), "--save", "kept", "--steps", "2", "--repeats", "1"]
    assert bench_in_process.main(["digits", *common, "--folder", "classified"]) == 0
    drawing = ["--judge-steps", "2", "--width", "24", "--layers", "1", "--count", "10", "--draw-steps", "2"]
    drawing += ["--pictures", "kept", "--folder", "drawn"]
    assert bench_in_process.main(["drawn-digits", *common, *drawing]) == 0
    # Nothing is done again.
    before = (tmp_path / "drawn/runs/softmax/metrics.jsonl").read_bytes()
    assert bench_in_process.main(["drawn-digits", *common, *drawing]) == 0
    assert (tmp_path / "drawn/runs/softmax/metrics.jsonl").read_bytes() == before
    (classified,) = (json.loads(path.read_text()) for path in (tmp_path / "kept").glob("digits_*.json"))
    assert len(classified["runs"]) == 4 and len(classified["resolutions"]) == 4 * 5
    (drawn,) = (json.loads(path.read_text()) for path in (tmp_path / "kept").glob("drawn-digits_*.json"))
    assert {one["model"] for one in drawn["models"]} == {"lightnet", "lion-retnet", "softmax"}
    assert all(0 <= one["recognised"] <= 1 and one["images"] == 10 for one in drawn["models"])
    assert len(list((tmp_path / "kept").glob("*.png"))) == 4
