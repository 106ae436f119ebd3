"""The comparison of architectures: two of them, three steps, on a corpus of a few kilobytes."""

import importlib.util
import json
import math
import shutil
import statistics
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.config.files import load
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import prepare
from lightscale.data_pipeline.store.token_store import TokenStore

pytest.importorskip("matplotlib", reason="the picture needs matplotlib")

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
ARGUMENTS = [
    *("--architecture", "tnl", "--architecture", "llama", "--size", "tiny", "--processes", "1"),
    "model.vocab_size=384",
    "data.store=store",
    "data.sequence_length=32",
    "data.validation.stdlib.sequences=4",
    "optimizer.warmup_steps=1",
    "train.global_batch_size=4",
    "train.micro_batch_size=4",
]


def make_store(folder: Path) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    sources = sorted((ROOT / "lightscale" / "training").glob("*.py"))
    for source in sources:
        shutil.copy(source, corpus)
    content = {
        "vocab_size": 384,
        "validation": 0.3,
        "duplicates": {"exact": False, "near": False},
        "sources": {"stdlib": {"paths": [str(corpus)]}},
    }
    prepare(make_corpus(content, origin="test"), folder / "store")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the comparison was made once, with its output in the file `stdout`."""
    folder = tmp_path_factory.mktemp("compare")
    make_store(folder)
    command = [sys.executable, str(ROOT / "tools" / "compare.py"), *ARGUMENTS, "--steps", str(STEPS)]
    options = ["--runs", "runs", "--out", "out", "--note", "noisy", "--json"]
    finished = subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=folder, timeout=110, check=False
    )
    # Three steps teach nothing, and the comparison must say so.
    assert finished.returncode == 1, finished.stderr
    assert "not below the unigram entropy" in finished.stderr
    (folder / "stdout").write_text(finished.stdout)
    return folder


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``compare(*arguments)`` in this process: the exit code."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = importlib.util.spec_from_file_location("lightscale_tools_compare", ROOT / "tools" / "compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return lambda *arguments: int(module.main([*ARGUMENTS, *arguments]))


@pytest.fixture
def found(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "out").glob("compare-*.json")
    result: dict[str, Any] = json.loads(path.read_text())
    assert json.loads((folder / "stdout").read_text()) == result
    return result


def metrics(folder: Path, architecture: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / architecture / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_results_are_those_of_the_runs(folder: Path, found: dict[str, Any]) -> None:
    assert list(found["architectures"]) == ["tnl", "llama"]
    for name, result in found["architectures"].items():
        lines = metrics(folder, name)
        steps = [line for line in lines if "loss" in line]
        assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
        losses = [line["loss"] for line in steps]
        assert result["training_losses"] == losses
        assert result["training_loss"] == pytest.approx(sum(losses) / STEPS)
        assert result["tokens_per_s"] == statistics.median(line["tokens_per_s"] for line in steps)
        last = [line["validation"]["stdlib"]["loss"] for line in lines if "validation" in line][-1]
        assert result["validation_loss"] == last > found["must_be_below"]
    # By hand from the size: tiny, with a gate of the head width 16 and LRPE angles of one layer.
    blocks = 4 * (4 * 64**2 + 3 * 64 * 128)
    by_hand = {"tnl": blocks + 4 * 2 * 64 * 16 + 64, "llama": blocks + 9 * 64}
    for name, result in found["architectures"].items():
        assert result["parameters_without_embedding"] == by_hand[name]
        assert result["parameters"] == by_hand[name] + 384 * 64


def test_runs_differ_in_the_architecture_only(folder: Path) -> None:
    tnl, llama = (load(folder / "runs" / name / "config.toml") for name in ("tnl", "llama"))
    assert tnl.model.layers == ("tnl",) * 4
    assert (llama.model.layers, llama.model.norm, llama.model.glu_activation) == (("llama",) * 4, "rmsnorm", "silu")
    changes = {"mixer": "tnl", "mixer_options": tnl.model.mixer_options, "norm": "srmsnorm", "glu_activation": "none"}
    assert llama.model_copy(update={"model": llama.model.model_copy(update=changes)}) == tnl


def test_entropy_is_that_of_the_validation_text(folder: Path, found: dict[str, Any]) -> None:
    source = TokenStore(folder / "store").source("stdlib-validation")
    counts = Counter(source.read(0, source.num_tokens).tolist())
    entropy = -sum(n / source.num_tokens * math.log(n / source.num_tokens) for n in counts.values())
    assert found["must_be_below"] == pytest.approx(entropy)
    assert found["must_be_below"] < found["unigram_entropy_nats"]["validation_under_train"]


def test_page_and_picture(folder: Path, found: dict[str, Any]) -> None:
    (page,) = (folder / "out").glob("compare-*.md")
    text = page.read_text()
    for name, result in found["architectures"].items():
        assert f"| {name} | {result['parameters']:,} |" in text
        assert f" {result['validation_loss']:.3f} |" in text
    assert found["command"] in text
    assert found["command"].startswith("python tools/compare.py --architecture tnl")
    assert {"noisy"} == set(found["notes"])
    assert "noisy" in text
    assert {"cpu", "cores", "date", "python"} <= found["machine"].keys()
    picture = page.with_suffix(".png")
    assert f"]({picture.name})" in text
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:]) == (960, 600)


def test_finished_runs_are_reused_and_learning_is_success(
    folder: Path,
    tmp_path: Path,
    compare: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With an entropy above the losses, the same runs are a success."""
    shutil.copytree(folder / "runs", tmp_path / "runs")
    shutil.copytree(folder / "store", tmp_path / "store")
    report = json.loads((tmp_path / "store" / "report.json").read_text())
    report["unigram_entropy_nats"] |= {"validation": 20.0, "validation_under_train": 21.0}
    (tmp_path / "store" / "report.json").write_text(json.dumps(report))
    monkeypatch.chdir(tmp_path)
    assert compare("--steps", str(STEPS), "--runs", "runs", "--out", "out") == 0
    output = capfd.readouterr()
    assert output.err.count("is finished") == 2
    assert metrics(tmp_path, "tnl") == metrics(folder, "tnl")
    assert all(word in output.out for word in ("tnl", "llama", "written:"))


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--architecture", "hgrn"], ["no such file", "did you mean", "hgrn2.toml"]),
        (["--size", "2M"], ["no such file", "size/2M.toml"]),
        (["train.validate_every=0"], ["train.validate_every above 0"]),
        (["data.store=nowhere"], ["nowhere"]),
    ],
    ids=lambda value: value[0],
)
def test_mistakes_are_named_before_anything_is_trained(
    folder: Path,
    tmp_path: Path,
    compare: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    messages: list[str],
) -> None:
    monkeypatch.chdir(folder)
    assert compare("--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), *arguments) == 78
    output = capfd.readouterr().err
    assert output.startswith("error: ")
    assert all(message in output for message in messages), output
    assert not (tmp_path / "out").exists()
    assert not any(path.is_dir() for path in (tmp_path / "runs").iterdir())
