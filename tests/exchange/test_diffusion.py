"""Models that predict noise, plain and exported: against a model written out in fp64, the sampler, and diffusers."""

import importlib.util
import json
import math
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import lightscale
from lightscale.cli import main
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.augmentation.draws import Draws
from lightscale.data_pipeline.augmentation.noise import as_bytes, betas, scaled, signal_shares
from lightscale.data_pipeline.tokenizers import NoText
from lightscale.errors import UserError
from lightscale.evaluation.drawing.pictures import as_pixels
from lightscale.evaluation.drawing.sampler import Sampler
from lightscale.exchange.files.modelling_file import DIFFUSERS, modelling_file
from lightscale.exchange.files.scheduler_config import scheduler_config
from lightscale.exchange.files.weights import exported_tensors, shape_of
from lightscale.exchange.files.written_run import write_run
from lightscale.exchange.plain.model import ImageDenoiser, shape_from
from lightscale.exchange.plain.patches import pixels_of
from lightscale.models.accounting import parameter_shapes

tasks = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "tasks" / "test_diffusion.py")))
plain, classifiers = tasks.plain, tasks.images
MODELS: dict[str, ModelConfig] = {
    **{name: tasks.MODELS[name] for name in tasks.WRITTEN_OUT},
    "orders": tasks.model_of(
        mixer="lion-s", norm="rmsnorm", mixer_options={"lion-s": {"patch_order": "alternating", "vector_decay": True}}
    ),
    "printed": tasks.model_of(
        mixer="lightnet", tpe={"form": "printed", "modes": 3}, mixer_options={"lightnet": {"causal": False}}
    ),
}
NAMES = [f"class {number}" for number in range(tasks.CLASSES)]
TASK = {"name": "diffusion", "timesteps": 40, "schedule": "cosine", "prediction": "v"}
IMAGES = 3
EXPORTED = ("dit", "lightnet", "causal")
Array = NDArray[np.float64]


def weights_of(model: ModelConfig) -> dict[str, Tensor]:
    """Of a model that was not trained; no two are alike. fp32, as runs keep them."""
    generator = torch.Generator().manual_seed(1)
    return {name: 0.2 * torch.randn(size, generator=generator) for name, size in parameter_shapes(model).items()}


def by_hand(model: ModelConfig, weights: dict[str, Tensor], tokens: Tensor, conditions: Tensor) -> dict[str, Any]:
    """Predictions (b, n, p) in fp64, and gradients of the sum of squares less than those wanted: nothing, 0."""
    wide = {name: weight.double() for name, weight in weights.items()}
    nothing, every = torch.zeros_like(tokens), torch.ones(tokens.shape[:2], dtype=torch.float64)
    figures = {"weights": wide, "tokens": tokens, "conditions": conditions, "wanted": nothing, "weight": every}
    found: dict[str, Any] = tasks.plainly(model, figures)
    return found


def inputs(model: ModelConfig) -> tuple[Tensor, Tensor]:
    assert model.grid is not None
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(IMAGES, model.grid.document_tokens, 12, generator=generator, dtype=torch.float64)
    return tokens, torch.tensor([[0, 2], [39, tasks.CLASSES], [17, 0]])


def rows_of(whole: Tensor, ranges: tuple[tuple[int, int], ...] | None) -> Tensor:
    return whole if ranges is None else torch.cat([whole[first:last] for first, last in ranges])


@pytest.mark.parametrize("name", MODELS)
def test_predictions_and_every_gradient_are_those_of_the_written_out_model(name: str) -> None:
    model, weights = MODELS[name], weights_of(MODELS[name])
    shape = shape_of(model, vocab_size=1)
    module, taken = ImageDenoiser(shape).double(), exported_tensors(model, vocab_size=1)
    module.load_state_dict({own: rows_of(weights[rows.key], rows.ranges).double() for own, rows in taken.items()})
    tokens, conditions = inputs(model)
    expected = by_hand(model, weights, tokens, conditions)
    assert shape.image is not None
    found = module(pixels_of(tokens, shape.image), *conditions.unbind(1))
    wanted = pixels_of(expected["logits"], shape.image)
    assert plain.error(found, wanted) < 1e-10
    # The loss of a token is a mean over the 12 pixels of its patch.
    (found.square().sum() / 12).backward()
    used = set()
    for own, weight in module.named_parameters():
        gradient = rows_of(expected["gradients"][taken[own].key], taken[own].ranges)
        assert weight.grad is not None and (weight.grad.norm() > 0 or own.endswith("k_proj.bias")), own
        assert (weight.grad - gradient).norm() < 1e-10 * max(1.0, float(gradient.norm())), own
        used.add(taken[own].key)
    assert used == weights.keys()


# ----- exports ------------------------------------------------------------------------------------------------------


def write(path: Path, name: str, **task: Any) -> Path:
    """A run with the weights of a model, as a training leaves them."""
    model = MODELS[name]
    path.mkdir(parents=True)
    weights = weights_of(model)
    assert model.grid is not None
    data = {"store": Path("store"), "sequence_length": model.grid.document_tokens}
    table = {**classifiers.RUN, "model": model.model_dump(), "task": {**TASK, **task}, "data": data}
    write_run(
        path,
        RunConfig.model_validate(table),
        NoText(),
        classes=NAMES,
        chat=None,
        shapes={key: tuple(weight.shape) for key, weight in weights.items()},
        blocks=[weight.contiguous().view(-1).view(torch.uint8).numpy().data for weight in weights.values()],
        step=3,
        tokens=99,
        reason="",
    )
    return path


def exported(folder: Path, name: str, *words: str, **task: Any) -> Path:
    run = write(folder / "runs" / name, name, **task)
    assert main(["export", str(run), "--to", str(folder / "out"), "--dtype", "fp32", *words]) == 0
    return folder / "out"


def pipeline_of(out: Path) -> Any:
    """The module that users import, by its file."""
    spec = importlib.util.spec_from_file_location("pipeline", out / "pipeline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sampler(name: str, *, prediction: str, schedule: str, timesteps: int, **more: Any) -> Sampler:
    ends = scaled(np.array([[0], [255]], dtype=np.uint8).repeat(12, axis=1), tasks.MEAN, tasks.STD)
    fields: dict[str, Any] = {
        "name": "ddim",
        "schedule": schedule,
        "timesteps": timesteps,
        "prediction": prediction,
        "no_class": tasks.CLASSES,
        "low": ends[0],
        "high": ends[1],
        **more,
    }
    return Sampler(**fields)


def predicted_by_hand(model: ModelConfig) -> Callable[[Array, int, NDArray[np.int64]], Array]:
    weights = weights_of(model)

    def predict(x: Array, timestep: int, classes: NDArray[np.int64]) -> Array:
        conditions = torch.stack([torch.full((len(x),), timestep), torch.from_numpy(classes)], dim=1)
        found: Array = by_hand(model, weights, torch.from_numpy(x), conditions)["logits"].numpy()
        return found

    return predict


@pytest.mark.parametrize(("name", "more"), [
    ("dit", {}),
    ("lightnet", {"schedule": "linear", "prediction": "epsilon", "timesteps": 1000}),
    ("causal", {"schedule": "linear", "timesteps": 12}),
])  # fmt: skip
def test_an_export_draws_the_images_of_lightscale(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Predictions of the written-out model through lightscale's own sampler; images by the export's two files."""
    out, model, task = exported(tmp_path, name, **more), MODELS[name], {**TASK, **more}
    pipeline = pipeline_of(out).LightscalePipeline.load(out)
    tokens, conditions = inputs(model)
    assert model.patches is not None and model.grid is not None
    with torch.no_grad():
        found = pipeline.transformer(pipeline.transformer.from_patches(tokens.float()), *conditions.unbind(1))
    wanted = pipeline.transformer.from_patches(by_hand(model, weights_of(model), tokens, conditions)["logits"])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    how = {key: task[key] for key in ("schedule", "prediction", "timesteps")}
    for steps, guidance, classes in ((5, 1.0, [1, 0, 3, 2]), (4, 2.5, [6, 1]), (1, 0.0, [2])):
        made = sampler(name, **how, steps=steps, guidance=guidance, seed=2**63 + 5)
        expected = made.draw(predicted_by_hand(model), classes, (model.grid.document_tokens, 12))
        pixels = as_pixels(as_bytes(expected, tasks.MEAN, tasks.STD), model.grid.shape, model.patches.size, 3)
        images = pipeline.draw(
            [NAMES[classes[0]], *classes[1:]], steps=steps, guidance=guidance, seed=2**63 + 5, batch_size=3
        )
        assert images.dtype == torch.uint8 and images.shape == pixels.shape
        # Rounding of the model at most moves a pixel to the next byte.
        difference = np.abs(images.numpy().astype(int) - pixels)
        assert difference.max() <= 1 and (difference > 0).mean() < 0.02
        # Where ε is predicted, what a random model sees is far out of range.
        assert len(np.unique(pixels)) > (1 if task["prediction"] == "epsilon" else 20)
    noise = torch.randn(2, *pipeline.transformer.from_patches(tokens).shape[1:], dtype=torch.float64)
    given = pipeline.draw([1, 2], steps=3, noise=noise)
    assert torch.equal(given, pipeline.draw([1, 2], steps=3, noise=noise.clone(), seed=9))
    assert not torch.equal(given, pipeline.draw([1, 2], steps=3))


def test_the_files_draw_without_lightscale(tmp_path: Path) -> None:
    out = exported(tmp_path, "lightnet", "--shard-size", "1MB")
    program = (
        "import sys; from pipeline import LightscalePipeline\n"
        "images = LightscalePipeline.load('.').draw(['class 3', 1], steps=2, guidance=2.0)\n"
        "assert not any(name.startswith(('lightscale', 'transformers', 'megatron')) for name in sys.modules)\n"
        "print(images.flatten().tolist())"
    )
    # Another package of lightscale's name would not be found either.
    done = subprocess.run([sys.executable, "-c", program], cwd=out, capture_output=True, text=True, check=False,
                          env={"PYTHONPATH": str(out), "PATH": ""})  # fmt: skip
    assert done.returncode == 0, done.stderr
    images = pipeline_of(out).LightscalePipeline.load(out).draw([3, 1], steps=2, guidance=2.0)
    assert json.loads(done.stdout) == images.flatten().tolist()


@pytest.mark.parametrize(("timesteps", "label_dropout"), [(12, 0.0), (12, 1.0), (60, 0.1)])
def test_the_usage_of_the_card_draws_whatever_was_learned(tmp_path: Path, timesteps: int, label_dropout: float) -> None:
    """With or without classes, and of fewer timesteps than are visited by default."""
    out = exported(tmp_path, "dit", timesteps=timesteps, label_dropout=label_dropout)
    card = (out / "README.md").read_text()
    usage = card.partition("```python\n")[2].partition("```")[0]
    assert "(1, h, w, c) uint8" in usage
    found: dict[str, Any] = {"PATH": str(out)}
    exec(usage.replace("PATH", repr(str(out))), found)
    assert found["images"].dtype == torch.uint8 and len(found["images"]) == 1
    pipeline = pipeline_of(out).LightscalePipeline.load(out)
    settings = {"steps": min(50, timesteps), "guidance": 0.0 if label_dropout == 1 else 1.0}
    assert torch.equal(found["images"], pipeline.draw([0], seed=0, **settings))


def test_files_of_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their names and contents; a change of any is found; nothing reads them back."""
    out = exported(tmp_path, "dit")
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} >= {
        *("model_index.json", "pipeline.py", "scheduler/scheduler_config.json", "run.toml", "README.md", "XXH128SUMS"),
        *("transformer/config.json", "transformer/modeling_lightscale.py"),
        "transformer/diffusion_pytorch_model.safetensors",
    }
    index = json.loads((out / "model_index.json").read_text())
    assert index["id2label"] == {str(number): name for number, name in enumerate(NAMES)}
    config = json.loads((out / "transformer" / "config.json").read_text())
    assert config.pop("_class_name") == index["transformer"][1] == "LightscaleTransformer"
    assert shape_from(config) == shape_of(MODELS["dit"], vocab_size=1)
    safetensors = pytest.importorskip("safetensors.torch")
    stored, weights = (
        safetensors.load_file(out / "transformer/diffusion_pytorch_model.safetensors"),
        weights_of(MODELS["dit"]),
    )
    for name, rows in exported_tensors(MODELS["dit"], vocab_size=1).items():
        assert torch.equal(stored.pop(name), rows_of(weights[rows.key], rows.ranges)), name
    assert not stored
    card = (out / "README.md").read_text()
    assert "library_name: diffusers" in card and "7 classes: class 0" in card
    assert main(["verify", str(out)]) == 0
    for words, message in {
        ("import", str(out), "--run", str(tmp_path / "again")): "is of a pipeline of diffusers, which is not read back",
        ("import", str(out / "transformer"), "--run", str(tmp_path / "again")): "model_index.json is of a pipeline",
    }.items():
        assert main(list(words)) != 0
        assert message in capsys.readouterr().err
    for source in (out, out / "transformer"):
        with pytest.raises(UserError, match="pipeline of diffusers, which is not read back"):
            lightscale.load(source)
    with pytest.raises(UserError, match="it predicts noise; use `lightscale draw`"):
        lightscale.load(tmp_path / "runs" / "dit")
    file = out / "scheduler" / "scheduler_config.json"
    file.write_text(file.read_text().replace("40", "41"))
    assert main(["verify", str(out)]) == UserError.EXIT_CODE
    assert "scheduler_config.json: expected xxh3-128" in capsys.readouterr().out


def test_wrong_requests_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write(tmp_path / "run", "dit", label_dropout=0.0))
    out = str(tmp_path / "out")
    for words, message in {
        ("--format", "transformers"): "--format transformers: the run draws images; use --format diffusers",
        ("--format", "fla"): "fla's language models predict only the next token",
        ("--ema", "slow"): "keeps no such average; optimizer.ema has: none",
        ("--adapter",): "has no [adapter]; remove this option",
    }.items():
        assert main(["export", run, "--to", out, *words]) != 0
        assert message in capsys.readouterr().err
        assert not Path(out).exists()
    assert main(["export", run, "--to", out]) == 0
    pipeline = pipeline_of(Path(out)).LightscalePipeline.load(out)
    for wrong, message in {
        (("no class",), ()): "class 'no class': use one of 0, 1",
        ((7,), ()): "class 7: use one of 0, 1, 2",
        ((1,), (("steps", 41),)): "steps = 41: use 1 to 40",
        ((1,), (("steps", 0),)): "steps = 0: use 1 to 40",
        ((), ()): r"len\(classes\) = 0: use 1 to inf",
        ((1,), (("batch_size", 0),)): "batch_size = 0: use 1 to inf",
        ((1,), (("seed", -1),)): "seed = -1: use 0 to",
        ((1,), (("guidance", math.nan),)): "guidance = nan: use",
        ((1,), (("guidance", 2.0), ("steps", 2))): "the model learned nothing without a class; use 1.0",
    }.items():
        with pytest.raises(ValueError, match=message):
            pipeline.draw(wrong[0], **dict(wrong[1]))
    # bf16, as without --dtype, has the wide weights of the mixers.
    assert pipeline.transformer.proj_out.weight.dtype == torch.bfloat16
    assert pipeline.draw([1], steps=2).shape == (1, *pipeline.transformer.shape.image.image_size, 3)


@pytest.fixture(scope="module")
def written_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return pipeline_of(exported(tmp_path_factory.mktemp("export"), "dit"))


@pytest.mark.parametrize("timesteps", [1, 2, 19, 20, 21, 1000])
def test_the_schedule_is_the_runs(written_pipeline: Any, timesteps: int) -> None:
    for schedule in ("linear", "cosine"):
        config = scheduler_config(schedule, timesteps, "v", [0.5], [0.5])
        np.testing.assert_allclose(
            written_pipeline.signal_shares(config), signal_shares(schedule, timesteps), rtol=1e-11
        )
        if schedule == "linear":
            # Of 20 timesteps the last one would have all the variance; two are even whatever they are.
            assert (config["trained_betas"] is None) == (timesteps > 20 or timesteps < 3)
            if config["trained_betas"] is not None:
                np.testing.assert_array_equal(config["trained_betas"], betas("linear", timesteps))


def test_the_range_of_pixels_is_written_where_diffusers_has_it() -> None:
    found = scheduler_config("cosine", 10, "epsilon", [0.5, 0.5, 0.5], [0.25])
    assert (found["clip_sample"], found["clip_sample_range"], found["prediction_type"]) == (True, 2.0, "epsilon")
    assert json.loads(json.dumps(found)) == found
    for mean, std in (([0.4], [0.5]), ([0.5, 0.5, 0.5], [0.5, 0.5, 0.25])):
        assert not scheduler_config("cosine", 10, "v", mean, std)["clip_sample"]


def test_the_noise_is_lightscales(written_pipeline: Any) -> None:
    for key in ((0, 0, 0), (7, 31, 0), (2**64 - 1, 5, 2)):
        found = written_pipeline.normal((4, 6), *key)
        np.testing.assert_allclose(found.numpy(), Draws(*key).normal(4, 6), rtol=0, atol=1e-13)


def test_the_modelling_file_needs_torch_and_safetensors_alone() -> None:
    text = modelling_file(DIFFUSERS)
    imported = {
        line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))
    }
    assert imported <= {"torch", "safetensors", "json", "pathlib", "math", "typing", "collections", "dataclasses"}
    assert "lightscale.exchange" not in text


# ----- in diffusers -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "prediction", "timesteps"), [
    ("cosine", "v", 40), ("linear", "epsilon", 40), ("linear", "v", 12), ("linear", "epsilon", 1000),
])  # fmt: skip
def test_ddim_of_diffusers_draws_the_same(
    schedule: str, prediction: str, timesteps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scheduler from our file, with our predictions: all timesteps, and a divisor of their number."""
    diffusers = pytest.importorskip("diffusers")
    model = MODELS["dit"]
    assert model.patches is not None
    patches = model.patches.model_copy(update={"mean": [0.5], "std": [0.5]})
    monkeypatch.setitem(MODELS, "dit", model.model_copy(update={"patches": patches}))
    out = exported(tmp_path, "dit", schedule=schedule, prediction=prediction, timesteps=timesteps)
    scheduler = diffusers.DDIMScheduler.from_pretrained(out, subfolder="scheduler")
    pipeline = pipeline_of(out).LightscalePipeline.load(out)
    classes = torch.tensor([1, 4])
    noise = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = signal_shares(schedule, timesteps)  # type: ignore[arg-type]

    def predict(x: Tensor, timestep: int) -> Tensor:
        with torch.no_grad():
            found: Tensor = pipeline.transformer(x.float(), torch.full((2,), timestep), classes)
        return found.double()

    for steps in (timesteps, timesteps // 4):
        scheduler.set_timesteps(steps)
        x, ours = noise, noise
        visited = scheduler.timesteps.tolist()
        for timestep, following in zip(visited, [*visited[1:], None], strict=True):
            x = scheduler.step(predict(x, timestep), timestep, x, use_clipped_model_output=True).prev_sample
            a, b = shares[timestep], 1.0 if following is None else shares[following]
            seen = predict(ours, timestep)
            if prediction == "v":
                clean = math.sqrt(a) * ours - math.sqrt(1 - a) * seen
            else:
                clean = (ours - math.sqrt(1 - a) * seen) / math.sqrt(a)
            clean = clean.clamp(-1, 1)
            ours = math.sqrt(b) * clean + math.sqrt((1 - b) / (1 - a)) * (ours - math.sqrt(a) * clean)
        # Its variances are fp32.
        torch.testing.assert_close(x, ours, rtol=0, atol=5e-3)
        if steps == timesteps:
            drawn = pipeline.draw(classes.tolist(), steps=steps, noise=noise)
            theirs = ((x * 0.5 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1)
            assert (drawn - theirs).abs().max() <= 1


@pytest.mark.long
def test_diffusers_loads_the_folder(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    out = exported(tmp_path, "lightnet")
    theirs = diffusers.DiffusionPipeline.from_pretrained(str(out), trust_remote_code=True)
    assert type(theirs.scheduler).__name__ == "DDIMScheduler"
    ours = pipeline_of(out).LightscalePipeline.load(out)
    how: dict[str, Any] = {"steps": 3, "guidance": 2.0, "seed": 4}
    assert torch.equal(theirs.draw(["class 2", 5], **how), ours.draw([2, 5], **how))
