"""Images drawn by commands: a run resumed on the same and on other ranks, its pictures on every axis, and refusals."""

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.directories import directory_name

Image = pytest.importorskip("PIL.Image", reason="images are written by Pillow")
commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]
images = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_classify_image.py"))))
RunRanks = Callable[..., list[Any]]
pytestmark = pytest.mark.long
STEPS = 12
SHAPE = [
    "data.store=store",
    "data.validation={held={source='a-validation', sequences=99}}",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "train.global_batch_size=16",
    "train.micro_batch_size=4",
    "optimizer.warmup_steps=1",
]
WORDS = [
    *("lightnet-dit-digits", *SHAPE, f"train.steps={STEPS}", f"train.validate_every={STEPS}"),
    *(f"checkpoint.every={STEPS - 4}", f"model.diffusion.num_labels={images.LABELS}", "optimizer.ema={slow=0.9}"),
]
JUDGE = ["vit-digits", *SHAPE, "train.steps=24", "train.validate_every=24", "checkpoint.every=24"]


def train_and_resume(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    lines = [["train", *WORDS, "--run", "runs/one"], ["train", *JUDGE, "--run", "runs/judge"]]
    results = commands(rank, world_size, init_method, folder, lines)
    for name in ("runs/again", "runs/on-four"):
        run = RunDirectory(name)
        shutil.copytree("runs/one", run.path)
        shutil.rmtree(run.checkpoints / directory_name(STEPS))
        run.status.unlink()
    again = [["train", *WORDS, "--run", "runs/again"]]
    return [*results, *commands(rank, world_size, f"{init_method}-again", folder, again)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, run_ranks: RunRanks) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    images.write_store(folder)
    (results,) = run_ranks(train_and_resume, 1, str(folder), timeout_s=600)
    assert [code for code, _ in results] == [0, 0, 0], results
    return folder


DRAW = ["draw", "runs/one", "--steps", "3", "--count", "6", "--guidance", "2"]
LAYOUTS = {
    "a": ["parallel.pipeline=2", "parallel.sequence=2", "--sampler", "ddpm"],
    "b": ["parallel.tensor=2", "--row-tokens", "64"],
}


def on_four(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    lines = [["train", *WORDS, "parallel.pipeline=2", "parallel.sequence=2", "--run", "runs/on-four"]]
    lines += [[*DRAW, *layout, "--out", f"four-{name}.png"] for name, layout in LAYOUTS.items()]
    return commands(rank, world_size, init_method, folder, lines)


def pixels(path: str) -> Any:
    return np.asarray(Image.open(path)).astype(int)


def test_runs_go_on_and_draw_the_same_on_other_ranks(
    trained: Path,
    run_ranks: RunRanks,
    monkeypatch: pytest.MonkeyPatch,
    steps_of: Callable[..., dict[int, tuple[Any, ...]]],
) -> None:
    lines, again = (read_metrics(trained / f"runs/{name}/metrics.jsonl") for name in ("one", "again"))
    assert again[-1]["attempt"] == 2
    assert steps_of(again) == steps_of(lines)
    for results in run_ranks(on_four, 4, str(trained), timeout_s=600):
        assert [code for code, _ in results] == [0, 0, 0], results
    other = read_metrics(trained / "runs/on-four/metrics.jsonl")
    for one, two in zip(lines[STEPS - 4 :], other[STEPS - 4 :], strict=True):
        assert two["attempt"] == 2
        assert abs(one["loss"] - two["loss"]) < 1e-5
    assert lines[-1]["validation"]["held"]["loss"] == pytest.approx(other[-1]["validation"]["held"]["loss"], abs=1e-5)
    monkeypatch.chdir(trained)
    for name, layout in LAYOUTS.items():
        of_one = [word for word in layout if not word.startswith("parallel.")]
        assert main([*DRAW, *of_one, "--out", f"one-{name}.png"]) == 0
        # Rounding of the model at most moves a pixel to the next byte.
        assert abs(pixels(f"one-{name}.png") - pixels(f"four-{name}.png")).max() <= 1


def test_pictures_averages_and_measures(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    assert main([*DRAW, "--out", "all.png", "--folder", "each", "--scale", "2"]) == 0
    picture = pixels("all.png")
    # A column for each of the four classes.
    assert picture.shape == (2 * 16 + 2, 4 * 16 + 3 * 2)
    single = pixels("each/1/00005.png")
    assert np.array_equal(picture[18::2, 18:34:2], single)
    assert main([*DRAW, "--out", "same.png", "--scale", "2"]) == 0
    assert Path("same.png").read_bytes() == Path("all.png").read_bytes()
    assert main([*DRAW, "--class", "2", "--out", "twos.png"]) == 0
    assert np.array_equal(pixels("twos.png")[:8], pixels("twos.png")[:8])
    # An average is that which `average --ema` writes as a run.
    assert main([*DRAW, "--ema", "slow", "--out", "slow.png", "--scale", "2"]) == 0
    assert not np.array_equal(pixels("slow.png"), picture)
    assert main(["average", "runs/one", "--ema", "slow", "--to", "runs/slow"]) == 0
    assert main(["draw", "runs/slow", *DRAW[2:], "--out", "averaged.png", "--scale", "2"]) == 0
    assert np.array_equal(pixels("slow.png"), pixels("averaged.png"))
    capsys.readouterr()
    assert main([*DRAW, "--out", "judged.png", "--classifier", "runs/judge", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 6
    assert 0 <= found["recognised"] <= 1
    assert found["frechet_distance"] > 0
    assert found["spatial_frechet_distance"] > 0
    assert 1 <= found["classifier_score"] <= images.LABELS


def test_an_export_draws_what_its_run_draws(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights and an average; the folder of the export alone."""
    monkeypatch.chdir(trained)
    for name, words in {"weights": [], "slow": ["--ema", "slow"]}.items():
        assert main([*DRAW, *words, "--seed", "3", "--folder", f"of-{name}", "--out", f"of-{name}.png"]) == 0
        out = Path(f"export-{name}")
        assert main(["export", "runs/one", *words, "--to", str(out), "--dtype", "fp32"]) == 0
        assert main(["verify", str(out)]) == 0
        assert ("average slow of 0.9" in (out / "README.md").read_text()) == (name == "slow")
        pipeline = runpy.run_path(str(out / "pipeline.py"))["LightscalePipeline"].load(out)
        classes = [number % images.LABELS for number in range(6)]
        drawn = pipeline.draw(classes, steps=3, guidance=2.0, seed=3).numpy().astype(int)
        for number, label in enumerate(classes):
            # Rounding of the model at most moves a pixel to the next byte.
            difference = abs(drawn[number, ..., 0] - pixels(f"of-{name}/{label}/{number:05}.png"))
            assert difference.max() <= 1 and (difference > 0).mean() < 0.05
    assert not np.array_equal(pixels("of-weights.png"), pixels("of-slow.png"))
    shutil.copytree("runs/one", "runs/averages-gone")
    assert main(["average", "runs/one", "--ema", "slow", "--to", "runs/one-average"]) == 0
    capsys.readouterr()
    assert main(["export", "runs/one-average", "--ema", "slow", "--to", "none"]) != 0
    assert "has no full checkpoint; only these have averages" in capsys.readouterr().err


def tune(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    """Adapters, exported while they are trained."""
    others = ("optimizer.ema", "train.steps", "train.validate_every", "checkpoint.every")
    words = ["train", *(word for word in WORDS if not word.startswith(others)), "optimizer.lr=0.1"]
    words += [f"train.init_from=runs/one@{STEPS}", "optimizer.ema={}"]
    words += ["train.steps=2", "train.validate_every=2", "checkpoint.every=2", "checkpoint.export_every=2"]
    return commands(
        rank, world_size, init_method, folder, [[*words, "adapter.name=lora", "adapter.r=2", "--run", "runs/lora"]]
    )


def test_adapters_of_a_run_that_draws_are_exported_in_the_weights(
    trained: Path, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    (results,) = run_ranks(tune, 1, str(trained), timeout_s=600)
    assert [code for code, _ in results] == [0], results
    out = Path("runs/lora/exports/step-00000002")
    pipeline = runpy.run_path(str(out / "pipeline.py"))["LightscalePipeline"].load(out)
    assert main(["export", "runs/lora", "--merge", "--to", "lora-fp32", "--dtype", "fp32"]) == 0
    wide = runpy.run_path("lora-fp32/pipeline.py")["LightscalePipeline"].load("lora-fp32")
    assert main(["draw", "runs/lora", *DRAW[2:], "--folder", "of-lora", "--out", "of-lora.png"]) == 0
    assert main([*DRAW, "--out", "of-base.png"]) == 0
    classes = [number % images.LABELS for number in range(6)]
    drawn = wide.draw(classes, steps=3, guidance=2.0).numpy().astype(int)
    for number, label in enumerate(classes):
        assert abs(drawn[number, ..., 0] - pixels(f"of-lora/{label}/{number:05}.png")).max() <= 1
    assert abs(pixels("of-lora.png") - pixels("of-base.png")).max() > 5
    assert pipeline.draw(classes, steps=3, guidance=2.0).shape == drawn.shape
    capsys.readouterr()
    assert main(["export", "runs/lora", "--adapter", "--to", "none"]) != 0
    assert "PEFT's files are for --format transformers, not diffusers; use --merge" in capsys.readouterr().err


def latents_of(folder: Path) -> list[str]:
    """Words of a training on latents, which are written with their store; a class is a corner that is far off."""
    labels = np.arange(160) % images.LABELS
    latents = np.random.default_rng(0).normal(size=(160, 8, 8, 5)) * 3
    for latent, label in zip(latents, labels, strict=True):
        latent.reshape(2, 4, 2, 4, 5)[label // 2, :, label % 2] += 40
    np.savez(folder / "latents.npz", latents=latents.astype(np.float16), labels=labels)
    words = ["--latents", "8x8x5", "--validation", "0.2", "--name", "a", "--out", str(folder / "latents")]
    assert main(["data", "prepare", str(folder / "latents.npz"), *words]) == 0
    patches = "model.patches={size=[2, 2], channels=5, latents=true, mean=[10.0], std=[17.0]}"
    return [*WORDS, "data.store=latents", patches, "task.augmentation.horizontal_flip=0.5"]


def on_latents(rank: int, world_size: int, init_method: str, folder: str, words: list[str]) -> list[tuple[int, str]]:
    draw = ["draw", "runs/of-latents", *DRAW[2:], "parallel.sequence=2", "--latents", "four.npz"]
    lines = [["train", *words, "parallel.tensor=2", "--run", "runs/of-latents"], draw]
    return commands(rank, world_size, init_method, folder, lines)


def test_latents_are_drawn_and_exported(
    trained: Path, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained and drawn on four ranks, drawn on one, by an export, and prepared again."""
    monkeypatch.chdir(trained)
    words = latents_of(trained)
    for results in run_ranks(on_latents, 4, str(trained), words, timeout_s=600):
        assert [code for code, _ in results] == [0, 0], results
    metrics = read_metrics(trained / "runs/of-latents/metrics.jsonl")
    assert np.isfinite(metrics[-1]["validation"]["held"]["loss"])
    run = ["draw", "runs/of-latents", *DRAW[2:]]
    assert main([*run, "--latents", "one.npz"]) == 0
    found, four = np.load("one.npz"), np.load("four.npz")
    assert found["latents"].dtype == np.float32 and found["latents"].shape == (6, 8, 8, 5)
    assert found["labels"].tolist() == ["0", "1", "2", "3", "0", "1"]
    np.testing.assert_allclose(found["latents"], four["latents"], rtol=0, atol=1e-3)
    # Of no pixels' range, and not rounded.
    assert found["latents"].min() < -1 and found["latents"].max() > 2
    assert main(["export", "runs/of-latents", "--to", "export-latents", "--dtype", "fp32"]) == 0
    pipeline = runpy.run_path("export-latents/pipeline.py")["LightscalePipeline"].load("export-latents")
    drawn = pipeline.draw([0, 1, 2, 3, 0, 1], steps=3, guidance=2.0).numpy()
    np.testing.assert_allclose(drawn, found["latents"], rtol=0, atol=1e-3)
    scheduler = json.loads(Path("export-latents/scheduler/scheduler_config.json").read_text())
    assert not scheduler["clip_sample"]
    again = ["data", "prepare", "one.npz", "--latents", "8x8x5", "--latents-dtype", "float32", "--validation", "0"]
    assert main([*again, "--out", "again"]) == 0
    capsys.readouterr()
    for more, message in {
        ("--out", "x.png", "--latents", "x.npz"): "--out x.png: it is for pixels, and runs/of-latents draws latents",
        ("--classifier", "runs/judge", "--latents", "x.npz"): "--classifier runs/judge: it is for pixels",
        ("--folder", "x", "--latents", "x.npz"): "--folder x: it is for pixels",
        ("--scale", "1", "--latents", "x.npz"): "--scale 1: it is for pixels",
        (): "--latents is missing: runs/of-latents draws latents",
        ("--latents", "x.png"): "use a name that ends in .npz",
        ("--latents", "one.npz"): "--latents one.npz: the path exists",
    }.items():
        assert main([*run, *more]) != 0, more
        assert message in capsys.readouterr().err, more
    assert main([*DRAW, "--latents", "x.npz"]) != 0
    assert "--latents x.npz: runs/one draws pixels; use --out FILE" in capsys.readouterr().err
    for refused in (
        [*DRAW, "--out", "x.png", "--classifier", "runs/judge"],
        ["resolutions", "runs/judge", "--image-sizes", "8x8"],
    ):
        assert main([*refused, "--store", "latents"]) != 0
        assert "use " in (error := capsys.readouterr().err) and "latents" in error
    assert main(DRAW) != 0
    assert "--out is missing" in capsys.readouterr().err
    for unfit in ([*WORDS, "data.store=latents"], [*words, "data.store=store"]):
        assert main(["train", *unfit, "--run", "runs/unfit"]) != 0
        assert "model.patches" in capsys.readouterr().err
    assert not Path("x.npz").exists() and not Path("x.png").exists()


def test_wrong_requests_are_refused(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    draw = ["draw", "runs/one", "--out", "new.png"]
    shutil.copytree("runs/one", "runs/never")
    config = Path("runs/never/config.toml")
    assert "label_dropout = 0.1" in config.read_text()
    config.write_text(config.read_text().replace("label_dropout = 0.1", "label_dropout = 0.0"))
    shutil.copytree("runs/judge", "runs/shallow")
    shallow = RunDirectory("runs/shallow").config
    shallow.write_text(shallow.read_text().replace("num_layers = 2", "num_layers = 1"))
    # As of a store by a stranger.
    RunDirectory("runs/never").classes.write_text(json.dumps(["a", "../../up", "b", "c"]))
    for words, message in {
        (*draw, "--count", "0"): "--count 0: must be at least 1",
        (*draw, "--guidance", "-1"): "--guidance -1.0: must be a number of at least 0",
        (*draw, "--steps", "1001"): "task.timesteps = 1000",
        (*draw, "--ema", "fast"): "optimizer.ema has: slow",
        (*draw, "--class", "9"): "the run has 4 classes: 0, 1, 2, 3",
        (*draw, "--real", "a"): "--real a has no effect without --classifier",
        (*draw, "--classifier", "runs/one"): 'use a run with task.name = "classify-image"',
        (*draw, "--classifier", "runs/judge", "--real", "b"): "no such source; use one of a, a-validation",
        (*draw, "--classifier", "runs/judge", "--count", "1"): "--count 1: --classifier compares at least 2 drawn",
        ("draw", "runs/never", *draw[2:], "--folder", "crafted"): "class '../../up' can be no folder's name",
        (*draw, "--classifier", "runs/shallow", "parallel.pipeline=2", "--processes", "2"): "model.num_layers = 1",
        ("draw", "runs/never", *draw[2:], "--guidance=2"): "learned nothing without a class; use --guidance 1",
        ("resolutions", "runs/one", "--image-sizes", "8x8"): 'use runs with task.name = "classify-image"',
        (*draw, "parallel.sequence=3"): "parallel.sequence",
        ("draw", "runs/one", "--out", "store"): "--out store: the path exists",
        ("draw", "runs/one", "--out", "new.jpg"): "--out new.jpg: it becomes a PNG file; use a name that ends in .png",
        (*draw, "--json"): "--json prints the measures of a classifier; add --classifier RUN",
        ("draw", "runs/judge", "--out", "new.png"): 'its task.name = "classify-image", which draws nothing',
        ("predict", "runs/one", "--file", "a.npz"): "use `lightscale draw` to draw images",
        ("generate", "runs/one", "--prompt", "a"): "use `lightscale draw` for this model",
        ("export", "runs/one", "--to", "export", "--format", "transformers"): "use --format diffusers",
        ("export", "runs/one@12", "--to", "export", "--ema", "fast"): "optimizer.ema has: slow",
        ("train", *WORDS, "task.seed=3", "--run", "runs/one"): "--allow-change task.seed",
        ("train", *WORDS, "model.diffusion.num_labels=3", "--run", "runs/x"): "label",
        ("train", *WORDS, "train.init_from=runs/judge@24", "--run", "runs/x"): "[model.diffusion]",
    }.items():
        assert main(list(words)) != 0, words
        error = capsys.readouterr().err
        assert message in error, words
        assert "Traceback" not in error
    assert not Path("new.png").exists()
