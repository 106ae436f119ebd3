"""Models of images, plain, exported and imported: against a model written out in fp64, and in transformers."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lightscale
from lightscale.cli import main
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.images import as_patches
from lightscale.data_pipeline.tokenizers import NoText
from lightscale.errors import UserError
from lightscale.exchange.files.weights import exported_tensors, shape_of
from lightscale.exchange.files.written_run import write_run
from lightscale.exchange.loaded_images import ImageModel
from lightscale.exchange.plain.model import ImageClassifier
from lightscale.models.accounting import parameter_shapes
from lightscale.models.resolution import interpolated

tasks = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "tasks" / "test_classify_image.py")))
plain = tasks.plain
OTHER_GRID = [3, 5]
MODELS: dict[str, ModelConfig] = {
    **tasks.MODELS,
    "coordinates": tasks.model_of(
        3,
        "last",
        learned=True,
        mixer=["tnl", "cosformer2", "lightnet", "decay-attention"],
        num_layers=4,
        mixer_options={
            "decay-attention": {
                "positions": "lrpe",
                "decay": "softplus",
                "scale": False,
                "feature_map": "silu",
                "short_convolution": 2,
            }
        },
    ),
    "printed": tasks.model_of(
        1, mixer="lightnet", tpe={"form": "printed", "modes": 3}, mixer_options={"lightnet": {"causal": False}}
    ),
}
CLASSES = [f"class {number}" for number in range(tasks.LABELS)]
IN_TRANSFORMERS = ("vit-printed", "vit-blocks", "lightnet", "coordinates", "overlap", "bi-rn")


def weights_of(model: ModelConfig) -> dict[str, Tensor]:
    """Of a model that was not trained; no two are alike. fp32, as runs keep them."""
    generator = torch.Generator().manual_seed(1)
    return {name: 0.3 * torch.randn(size, generator=generator) for name, size in parameter_shapes(model).items()}


def pixels_of(model: ModelConfig) -> np.ndarray[Any, np.dtype[np.uint8]]:
    assert model.image_shape is not None
    return np.random.default_rng(7).integers(0, 256, (2, *model.image_shape)).astype(np.uint8)


def by_hand(model: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Log-probabilities, and gradients of the loss of ``soft_labels``, in fp64."""
    assert model.grid is not None and model.patches is not None
    leading, overlap = model.grid.leading_tokens, model.patches.overlap
    tokens = torch.from_numpy(as_patches(pixels_of(model), tasks.PATCH, leading, overlap))
    soft = torch.full((2, tasks.LABELS), 0.5 / tasks.LABELS, dtype=torch.float64)
    soft[0, 1] += 0.5
    soft[1, 4] += 0.5
    wide = {name: weight.double() for name, weight in weights.items()}
    found: dict[str, Any] = tasks.plainly(model, {"weights": wide, "tokens": tokens, "soft_labels": soft})
    return {**found, "soft_labels": soft}


def rows_of(whole: Tensor, ranges: tuple[tuple[int, int], ...] | None) -> Tensor:
    return whole if ranges is None else torch.cat([whole[first:last] for first, last in ranges])


def library_model(model: ModelConfig, weights: dict[str, Tensor]) -> ImageModel:
    module = ImageClassifier(shape_of(model, vocab_size=1)).double()
    taken = exported_tensors(model, vocab_size=1)
    module.load_state_dict({own: rows_of(weights[rows.key], rows.ranges).double() for own, rows in taken.items()})
    return ImageModel(module=module, origin="here")


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_every_gradient_are_those_of_the_written_out_model(name: str) -> None:
    model, weights = MODELS[name], weights_of(MODELS[name])
    expected, found = by_hand(model, weights), library_model(model, weights)
    logits = found.logits(torch.from_numpy(pixels_of(model))).log_softmax(-1)
    assert plain.error(logits, expected["logits"]) < 1e-10
    losses = -(expected["soft_labels"] * logits).sum(-1)
    (losses @ torch.tensor([0.3, 1.1], dtype=torch.float64)).backward()
    taken, used = exported_tensors(model, vocab_size=1), set()
    for own, weight in found.module.named_parameters():
        wanted = rows_of(expected["gradients"][taken[own].key], taken[own].ranges)
        assert weight.grad is not None, own
        # The bias of keys moves all scores of a query alike.
        assert wanted.norm() > 1e-12 or own.endswith("k_proj.bias"), own
        assert (weight.grad - wanted).norm() < 1e-10 * max(1.0, float(wanted.norm())), own
        used.add(taken[own].key)
    assert used == weights.keys()


@pytest.mark.parametrize("name", MODELS)
def test_other_sizes_have_interpolated_positions_and_coordinates(name: str) -> None:
    trained, model, key = MODELS[name], MODELS[name].on_grid(OTHER_GRID), "embedding.positions.table"
    weights = weights_of(trained)
    found = library_model(trained, weights)
    if key in weights:
        assert trained.grid is not None
        weights = {**weights, key: interpolated(weights[key].double(), trained.grid, OTHER_GRID)}
    height, width, _ = model.image_shape or (0, 0, 0)
    pixels = torch.from_numpy(pixels_of(model))
    logits = found.logits(pixels, (height, width)).log_softmax(-1)
    assert plain.error(logits, by_hand(model, weights)["logits"]) < 1e-10
    with pytest.raises(UserError, match=r"images must be uint8, 4 x 8 x 3 .* got torch.uint8, 6 x 10 x 3"):
        found.logits(pixels)
    with pytest.raises(UserError, match=r"image_size = 6, 9: patches of 2 x 2 must divide it"):
        found.logits(pixels, (6, 9))


def write(folder: Path, name: str) -> Path:
    """A run with the weights of a model, as a training leaves them."""
    model, path = MODELS[name], folder / name
    path.mkdir(parents=True)
    weights = weights_of(model)
    config = RunConfig.model_validate({**tasks.RUN, "model": model.model_dump()} | data(model))
    write_run(
        path,
        config,
        NoText(),
        classes=CLASSES,
        chat=None,
        shapes={key: tuple(weight.shape) for key, weight in weights.items()},
        blocks=[weight.contiguous().view(-1).view(torch.uint8).numpy().data for weight in weights.values()],
        step=3,
        tokens=99,
        reason="",
    )
    return path


def data(model: ModelConfig) -> dict[str, Any]:
    assert model.grid is not None
    return {"data": {"store": Path("store"), "sequence_length": model.grid.document_tokens}}


def read_back(run: Path) -> dict[str, Tensor]:
    loaded = lightscale.load(run)
    assert isinstance(loaded, ImageModel)
    return {name: weight.detach() for name, weight in loaded.module.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_what_was_exported_comes_back_bit_by_bit(name: str, tmp_path: Path) -> None:
    """With the run's own configuration beside it and without; config.json says all of the model."""
    run = write(tmp_path / "runs", name)
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    expected = read_back(run)
    of_export = read_back(tmp_path / "out")
    for file in ("run.toml", "XXH128SUMS"):
        (tmp_path / "out" / file).unlink()
    assert main(["import", str(tmp_path / "out"), "--run", str(tmp_path / "back")]) == 0
    back = read_back(tmp_path / "back")
    assert list(expected) == list(of_export) == list(back)
    assert all(torch.equal(expected[key], other[key]) for other in (of_export, back) for key in expected)
    assert shape_of(MODELS[name], vocab_size=1) == lightscale.load(tmp_path / "back").module.shape
    assert json.loads((tmp_path / "back" / "classes.json").read_text()) == CLASSES


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_transformers_computes_the_runs_model(name: str, tmp_path: Path, transformers: Any) -> None:
    """Logits at the trained size and another, the image processor's pixels; and saved again it is the same."""
    image = pytest.importorskip("PIL.Image", reason="the image processor reads images of Pillow")
    run, model, out = write(tmp_path / "runs", name), MODELS[name], tmp_path / "out"
    assert main(["export", str(run), "--to", str(out), "--dtype", "fp32"]) == 0
    ours = lightscale.load(run)
    assert isinstance(ours, ImageModel)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(str(out), trust_remote_code=True)
    is_own = type(theirs).__module__.startswith("transformers.models.vit.")
    assert is_own == (name == "vit-printed") == (not (out / "modeling_lightscale.py").exists())
    processor = transformers.AutoImageProcessor.from_pretrained(str(out), trust_remote_code=True)
    pixels = pixels_of(model)
    made = processor(images=[image.fromarray(one) for one in pixels], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(made, ours.pixel_values(pixels), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(theirs(made).logits, ours.logits(pixels), rtol=1e-5, atol=1e-5)
        # transformers interpolates from square grids alone.
        if not is_own:
            other = pixels_of(model.on_grid(OTHER_GRID))
            values = ours.pixel_values(other, other.shape[1:3])
            found = theirs(values, interpolate_pos_encoding=True).logits
            torch.testing.assert_close(found, ours.logits(other, other.shape[1:3]), rtol=1e-5, atol=1e-5)
            with pytest.raises(ValueError, match="6 x 10 pixels, and the model was trained on 4 x 8"):
                theirs(values)
    assert theirs.config.id2label == dict(enumerate(CLASSES))
    loss = theirs(made, labels=torch.tensor([1, 2])).loss
    expected = torch.nn.functional.cross_entropy(ours.logits(pixels), torch.tensor([1, 2]))
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)
    theirs.save_pretrained(tmp_path / "again")
    processor.save_pretrained(tmp_path / "again")
    again = lightscale.load(tmp_path / "again")
    assert isinstance(again, ImageModel)
    assert torch.equal(again.logits(pixels), ours.logits(pixels))
    assert again.classes == tuple(CLASSES)


def test_names_of_vit_in_files_of_both_kinds_are_read(tmp_path: Path, transformers: Any) -> None:
    """A model that transformers made, saved with the names of its version and with those of published files."""
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=6,
        patch_size=2,
        num_labels=3,
        hidden_act="gelu",
    )
    theirs = transformers.ViTForImageClassification(config).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 6, 6, 3)).astype(np.uint8)
    for original in (False, True):
        path = tmp_path / f"saved-{original}"
        theirs.save_pretrained(path, save_original_format=original)
        with pytest.raises(UserError, match=r"preprocessor_config.json: missing"):
            lightscale.load(path)
        scaling = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}
        (path / "preprocessor_config.json").write_text(json.dumps(scaling))
        ours = lightscale.load(path)
        assert isinstance(ours, ImageModel)
        with torch.no_grad():
            expected = theirs(ours.pixel_values(pixels)).logits
            torch.testing.assert_close(ours.logits(pixels), expected, rtol=1e-5, atol=1e-5)
        assert main(["import", str(path), "--run", str(tmp_path / f"run-{original}")]) == 0
        for key, weight in read_back(tmp_path / f"run-{original}").items():
            assert torch.equal(weight, dict(ours.module.named_parameters())[key]), key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, "do not go together"),
        ({"vocab_size": 5}, "do not go together"),
        ({"architectures": ["LightscaleForCausalLM"]}, "do not go together"),
        ({"learned_positions": 3}, "learned_positions = 3, and an image has 9 tokens"),
        ({"image.image_mean": [0.1, 0.2]}, "image.image_mean has 2 numbers for 3 channels"),
        ({"image.patch_size": [2]}, "image.patch_size"),
        ({"image.other": 1}, "image.other"),
    ],
)
def test_configurations_that_do_not_fit_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert main(["export", str(write(tmp_path / "runs", "printed")), "--to", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "XXH128SUMS").unlink()
    path = tmp_path / "out" / "config.json"
    content = json.loads(path.read_text())
    ((key, value),) = change.items()
    table, _, inner = key.rpartition(".")
    (content[table] if table else content)[inner] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        lightscale.load(tmp_path / "out")


def test_an_image_file_is_classified(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")
    model = lightscale.load(write(tmp_path, "vit-blocks"))
    assert isinstance(model, ImageModel)
    pixels = pixels_of(MODELS["vit-blocks"])
    image.fromarray(pixels[0]).save(tmp_path / "one.png")
    found = model.classify(tmp_path / "one.png")
    assert found == model.classify(pixels[0])
    assert list(found) == [CLASSES[n] for n in model.logits(pixels)[0].argsort(descending=True).tolist()]
    assert torch.equal(model.embed(pixels)[0], model.embed(tmp_path / "one.png"))
    assert model.embed(pixels).shape == (2, 16)
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n1234")
    with pytest.raises(UserError, match=r"bad.png: the image is broken"):
        model.classify(tmp_path / "bad.png")
    with pytest.raises(UserError, match="classify takes one image"):
        model.classify(pixels)
    with pytest.raises(UserError, match=r"use one path, or uint8 pixels in an array or a tensor; got list"):
        model.logits([tmp_path / "one.png"])  # type: ignore[arg-type]
