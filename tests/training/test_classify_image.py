"""Images classified by commands: from files to a store to a run, resumed on the same and on other ranks."""

import importlib.util
import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.config.files import load, to_toml
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import choose_run
from lightscale.evaluation.resolutions.request import check_request
from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.directories import directory_name

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")
commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]
RunRanks = Callable[..., list[Any]]
STEPS, LABELS = 24, 4
WORDS = [
    "vit-digits",
    "data.store=store",
    "data.validation={held={source='a-validation', sequences=99}}",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=32",
    f"train.steps={STEPS}",
    "train.global_batch_size=16",
    "train.micro_batch_size=4",
    f"train.validate_every={STEPS}",
    f"checkpoint.every={STEPS - 4}",
    "optimizer.warmup_steps=1",
    "task.label_smoothing=0.05",
    "task.augmentation={crop_scale=[0.8, 1.0], rand_augment_ops=1, rand_augment_magnitude=2, mixup_alpha=0.2}",
]


def write_store(folder: Path) -> None:
    """The quarter of an image that is bright is its class."""
    generator = np.random.default_rng(0)
    labels = np.arange(160) % LABELS
    images = generator.integers(0, 100, (160, 8, 8))
    for image, label in zip(images, labels, strict=True):
        image.reshape(2, 4, 2, 4)[label // 2, :, label % 2] += 120
    np.savez(folder / "a.npz", images=images.astype(np.uint8), labels=labels)
    words = ["--images", "8x8x1", "--validation", "0.2", "--name", "a", "--out", str(folder / "store")]
    assert main(["data", "prepare", str(folder / "a.npz"), *words]) == 0


def train_and_resume(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    results = commands(rank, world_size, init_method, folder, [["train", *WORDS, "--run", "runs/one"]])
    for name in ("runs/again", "runs/on-four"):
        run = RunDirectory(name)
        shutil.copytree("runs/one", run.path)
        shutil.rmtree(run.checkpoints / directory_name(STEPS))
        run.status.unlink()
    again = [["train", *WORDS, "--run", "runs/again"]]
    return [*results, *commands(rank, world_size, f"{init_method}-again", folder, again)]


def on_four(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    words = ["train", *WORDS, "parallel.pipeline=2", "parallel.sequence=2", "--run", "runs/on-four"]
    return commands(rank, world_size, init_method, folder, [words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, run_ranks: RunRanks) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_store(folder)
    (results,) = run_ranks(train_and_resume, 1, str(folder), timeout_s=200)
    assert [code for code, _ in results] == [0, 0], results
    return folder


def test_images_are_classified(trained: Path) -> None:
    found = read_metrics(trained / "runs/one/metrics.jsonl")[-1]["validation"]["held"]
    assert found["accuracy"] > 0.9, found
    assert found["top5_accuracy"] == 1.0
    assert json.loads((trained / "runs/one/classes.json").read_text()) == ["0", "1", "2", "3"]


def test_a_resumed_run_is_the_same_also_on_other_ranks(
    trained: Path, run_ranks: RunRanks, steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    lines, again = (read_metrics(trained / f"runs/{name}/metrics.jsonl") for name in ("one", "again"))
    assert again[-1]["attempt"] == 2
    assert steps_of(again) == steps_of(lines)
    for ((code, stderr),) in run_ranks(on_four, 4, str(trained), timeout_s=200):
        assert code == 0, stderr
    other = read_metrics(trained / "runs/on-four/metrics.jsonl")
    for one, two in zip(lines[STEPS - 4 :], other[STEPS - 4 :], strict=True):
        assert two["attempt"] == 2
        assert abs(one["loss"] - two["loss"]) < 1e-5
    assert other[-1]["validation"]["held"]["accuracy"] == lines[-1]["validation"]["held"]["accuracy"]


LARGER = ["--image-size=12x16", "--resize=stretch"]


def predict_on_four(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    words = ["predict", "runs/one", "--file", "photos"]
    layouts = {
        "a": ["parallel.pipeline=2", "parallel.sequence=2"],
        "b": ["parallel.tensor=2"],
        "c": ["--row-tokens=64"],
    }
    asked = [[*words, *layout, f"--out={name}.jsonl"] for name, layout in layouts.items()]
    asked += [[*words, *layouts[name], *LARGER, f"--out=larger-{name}.jsonl"] for name in "ab"]
    vectors = [[*words, *layouts[name], "--embed=mean", f"--out=vectors-{name}.jsonl"] for name in "ab"]
    return commands(rank, world_size, init_method, folder, [*asked, *vectors])


def predicted(path: Path) -> dict[str, dict[str, Any]]:
    return {one["file"]: one for one in map(json.loads, path.read_text().splitlines())}


@pytest.mark.long
def test_files_are_predicted_as_validation_does(
    trained: Path, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    source = TokenStore(Path("store")).source("a-validation")
    labels = source.document_values("label", 0, source.num_documents).tolist()
    for number, pixels in enumerate(source.document_values("image", 0, source.num_documents)):
        path = Path("photos") / "some" / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.reshape(8, 8)).save(path)
    assert main(["predict", "runs/one", "--file", "photos", "--out", "one.jsonl"]) == 0
    found = predicted(Path("one.jsonl"))
    assert list(found) == [f"photos/some/{number:03}.png" for number in range(len(labels))]
    rows = list(zip(found.values(), map(str, labels), strict=True))
    assert all(sum(one["classes"].values()) == pytest.approx(1, abs=1e-5) for one, _ in rows)
    # The trainer's own numbers, of the same checkpoint.
    measured = read_metrics(Path("runs/one/metrics.jsonl"))[-1]["validation"]["held"]
    losses = [-np.log(one["classes"][label]) for one, label in rows]
    assert np.mean(losses) == pytest.approx(measured["loss"], abs=1e-5)
    assert np.mean([one["class"] == label for one, label in rows]) == pytest.approx(measured["accuracy"], abs=1e-9)
    for results in run_ranks(predict_on_four, 4, str(trained), timeout_s=300):
        assert [code for code, _ in results] == [0] * 7, results
    for name in "abc":
        other = predicted(Path(f"{name}.jsonl"))
        assert list(other) == list(found)
        for one, two in zip(found.values(), other.values(), strict=True):
            assert two["classes"] == pytest.approx(one["classes"], abs=1e-6)
    assert main(["predict", "runs/one", "--file", "photos", *LARGER, "--out", "larger.jsonl"]) == 0
    of_larger = predicted(Path("larger.jsonl"))
    for name in "ab":
        other = predicted(Path(f"larger-{name}.jsonl"))
        for path, one in of_larger.items():
            assert other[path]["classes"] == pytest.approx(one["classes"], abs=1e-6)
    # Half as many pixels again in one direction: the quarter that is bright is seen still, by other numbers.
    assert (
        np.mean([one["class"] == label for one, label in zip(of_larger.values(), map(str, labels), strict=True)]) > 0.7
    )
    assert any(of_larger[path]["classes"] != one["classes"] for path, one in found.items())
    one, two = (predicted(Path(f"vectors-{name}.jsonl")) for name in "ab")
    assert len(one) == len(labels)
    for path, vector in one.items():
        assert len(vector["embedding"]) == 32
        assert vector["embedding"] == pytest.approx(two[path]["embedding"], abs=1e-5)


def test_commands_know_images(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    assert main(["data", "samples", "runs/one", "--step", "2", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)
    assert len({one["window"] for one in step["samples"]}) == 16
    assert all(one["documents"][0]["document"] == one["window"] for one in step["samples"])
    assert main(["plan", *WORDS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["embedding"] == 32 * 5
    Path("odd").mkdir()
    for name, shape in (("wide", (8, 9)), ("red", (8, 8, 3))):
        Image.fromarray(np.zeros(shape, dtype=np.uint8)).save(f"odd/{name}.png")
    Path("odd/broken.png").write_bytes(Path("odd/red.png").read_bytes()[:40])
    words = ["predict", "runs/one", "--file", "odd/wide.png", "--resize", "crop", "--top", "2", "--json"]
    assert main(words) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert found["file"] == "odd/wide.png"
    assert len(found["classes"]) == 2
    assert found["class"] == max(found["classes"], key=found["classes"].get)
    # Of other classes: numbers alone would fit.
    with np.load("a.npz") as arrays:
        np.savez("named.npz", images=arrays["images"], labels=np.array(list("gfed"))[arrays["labels"]])
    assert main(["data", "prepare", "named.npz", "--images", "8x8x1", "--validation", "0", "--out", "named"]) == 0
    of_named = ["data.validation={held={store='named', source='named', sequences=9}}"]
    for words, message in {
        ("generate", "runs/one", "--prompt", "a"): "score and generate text; use a run of texts",
        ("predict", "runs/one", "--file", "nowhere"): "--file nowhere: no such file or directory",
        ("predict", "runs/one", "--file", "runs"): "--file runs: no images are there; their names end in .bmp",
        (
            "predict",
            "runs/one",
            "--file",
            "odd/wide.png",
        ): "wide.png: the image has 8 x 9 pixels, and the model of 8x8x1",
        ("predict", "runs/one", "--file", "odd/red.png"): "has mode RGB, and the model of 8x8x1 needs L; use --convert",
        ("predict", "runs/one", "--file", "odd", "--image-size", "9x8"): "9 pixels are no multiple of the 2 of a patch",
        ("predict", "runs/one", "--file", "odd", "--image-size", "big"): "must be HEIGHTxWIDTH, such as 224x224",
        ("predict", "runs/one", "--file", "odd/broken.png"): "broken.png: the image is broken (",
        ("predict", "runs/one", "parallel.sequence=3", "--file", "odd/red.png", "--convert-modes"): "parallel.sequence",
        ("train", *WORDS, *of_named, "--run", "runs/x"): "label 0 is the class d, and 0 in data.store = store; prepare",
        ("train", *WORDS, "task.label_smoothing=0.1", "--run", "runs/one"): "--allow-change task.label_smoothing",
        ("train", *WORDS, "task.augmentation.crop_scale=[2.0, 1.0]", "--run", "runs/x"): "a number > 0 and <= 1",
        ("train", "listops-tiny", "data.store=store", "--run", "runs/text"): "data.store = store has images",
        ("train", *WORDS, "model.grid.shape=[8, 4]", "data.sequence_length=32", "--run", "runs/x"): "--images 16x8x1",
    }.items():
        assert main(list(words)) != 0
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
    assert sorted(path.name for path in (trained / "runs").iterdir()) == ["again", "on-four", "one"]


def test_resolutions_are_measured_as_validation_does(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trained size by the trainer's own numbers, another by those of files that are scaled as well."""
    monkeypatch.chdir(trained)
    sizes = ["--image-sizes", "12x16", "8x8", "4x4", "--batch-size", "10"]
    picture = ["--plot", "curve.png"] if importlib.util.find_spec("matplotlib") else []
    assert main(["resolutions", "runs/one", *sizes, "--out", "curve.jsonl", *picture]) == 0
    assert "12x16" in capsys.readouterr().out
    larger, own, smaller = map(json.loads, Path("curve.jsonl").read_text().splitlines())
    measured = read_metrics(Path("runs/one/metrics.jsonl"))[-1]["validation"]["held"]
    for key in ("loss", "accuracy", "top5_accuracy"):
        assert own[key] == pytest.approx(measured[key], abs=1e-5), key
    assert (own["tokens"], smaller["tokens"], larger["tokens"]) == (16, 4, 48)
    assert own["images_per_s"] > 0
    assert own["images"] == TokenStore(Path("store")).source("a-validation").num_documents
    assert not picture or Path("curve.png").stat().st_size > 1000
    source = TokenStore(Path("store")).source("a-validation")
    labels = source.document_values("label", 0, source.num_documents).tolist()
    folder = Path("scaled")
    folder.mkdir()
    for number, pixels in enumerate(source.document_values("image", 0, source.num_documents)):
        Image.fromarray(pixels.reshape(8, 8)).save(folder / f"{number:03}.png")
    words = ["--image-size=12x16", "--resize=crop", "--out=scaled.jsonl"]
    assert main(["predict", "runs/one", "--file", "scaled", *words]) == 0
    losses = [
        -np.log(one["classes"][str(n)]) for one, n in zip(predicted(Path("scaled.jsonl")).values(), labels, strict=True)
    ]
    assert larger["loss"] == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--image-sizes", "9x8"], "9 pixels are no multiple of the 2 of a patch .*; use 8"),
        (["--image-sizes", "8"], "--image-sizes 8: must be HEIGHTxWIDTH"),
        (["--image-sizes", "8x8", "--images", "0"], "--images 0: must be at least 1"),
        (["--image-sizes", "8x8", "--source", "none"], "none"),
        (["--image-sizes", "8x8", "--plot", "a.txt"], "--plot a.txt: a picture has the suffix"),
    ],
)
def test_resolutions_that_do_not_fit_are_named(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(trained)
    assert main(["resolutions", "runs/one", *words]) == 78
    assert re.search(message, capsys.readouterr().err)


def test_resolutions_read_the_store_of_the_validation(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no store of other classes, whose numbers would say nothing."""
    monkeypatch.chdir(trained)
    shutil.copytree("store", "second")
    shutil.copytree("runs/one", "runs/second")
    run = RunDirectory("runs/second")
    run.config.write_text(to_toml(load(run.config, ["data.validation.held.store=second"])))

    def source_of(**given: Path) -> Path:
        asked: dict[str, Any] = {"store": None, "source": None, "num_images": None, "batch_size": 10, **given}
        return check_request([choose_run(run.path, any_task=True)], ["8x8"], **asked).source.directory

    assert source_of().parent.name == "second"
    own = json.loads(run.classes.read_text())
    run.classes.write_text(json.dumps([*own, "of other stores alone"]))
    assert source_of(store=Path("store")).parent.name == "store"
    run.classes.write_text(json.dumps(["3", "2", "1", "0"]))
    with pytest.raises(UserError, match=r"store: its classes are not those of runs/second \(3, 2, 1, 0, …\)"):
        source_of(store=Path("store"))


def test_an_export_that_came_back_is_the_run_and_trains_on(
    trained: Path, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    assert main(["export", "runs/one", "--to", "exported", "--dtype", "fp32"]) == 0
    assert main(["import", "exported", "--run", "runs/back"]) == 0
    (results,) = run_ranks(train_on, 1, str(trained), timeout_s=200)
    assert results[0][0] == 0, results
    lines = read_metrics(trained / "runs/one/metrics.jsonl")
    found = read_metrics(trained / "runs/on/metrics.jsonl")
    # The same images as of the run that began anew, by weights that know the classes.
    assert found[0]["loss"] < 0.7 * lines[0]["loss"]
    assert found[-1]["validation"]["held"]["accuracy"] > 0.8


def train_on(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    words = ["train", *WORDS, "train.init_from=runs/back@0", "train.steps=4", "train.validate_every=4"]
    return commands(rank, world_size, init_method, folder, [[*words, "checkpoint.every=4", "--run", "runs/on"]])
