"""Images classified by a model written out plainly, in fp64; on every axis; and as batches, cut and counted by hand."""

import functools
import itertools
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightscale.config.files import load
from lightscale.config.layout import check_layout
from lightscale.config.model import GridConfig, ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.images import as_patches
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader, validation_batches
from lightscale.data_pipeline.loading.windows import Batch
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import NoText
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes, parameter_terms, rank_parameters
from lightscale.models.language_model import language_model_chunks, transformer_config
from lightscale.models.layers.patch_orders import alternating_orders
from lightscale.models.resolution import interpolated, set_grid
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import draw_weights, named_parameters
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.planning.memory import rank_memory
from lightscale.tasks.classify_image import ClassifyImage, ClassifyImageConfig
from lightscale.training.optimizer.adamw import AdamW

HELPERS = Path(__file__).parents[1] / "helpers"
parity, plain, mixers, drawing = (
    SimpleNamespace(**runpy.run_path(str(HELPERS / f"{name}.py")))
    for name in ("parity", "plain_models", "plain_mixers", "drawing")
)
RunRanks = Callable[..., list[Any]]
SHAPE, PATCH, GRID, LABELS, IMAGES = (4, 8, 3), (2, 2), [2, 4], 7, 24


def model_of(
    leading: int = 2, pooling: str = "mean", *, learned: bool = False, overlap: int = 0, **more: Any
) -> ModelConfig:
    scaling = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}
    table = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 4,
        "intermediate_size": 24,
        "init_std": 0.3,
        "head": {"num_labels": LABELS, "pooling": pooling},
        "grid": {"shape": GRID, "leading_tokens": leading},
        "patches": {"size": list(PATCH), "overlap": overlap, **scaling, "learned_positions": learned},
        **more,
    }
    table["head"] |= {"bias": bool(more.get("mlp_bias"))}
    return ModelConfig.model_validate(table)


OF_VIT: dict[str, Any] = {
    "norm": "layernorm",
    "norm_elementwise_affine": True,
    "norm_eps": 1e-5,
    "gated_linear_unit": False,
    "glu_activation": "gelu",
    "mlp_bias": True,
}
MODELS = {
    "vit": model_of(
        pooling="first",
        learned=True,
        mixer="llama",
        norm="rmsnorm",
        glu_activation="gelu_tanh",
        mixer_options={"llama": {"causal": False, "positions": "none"}},
    ),
    # ViT itself, and its blocks around other mixers.
    "vit-printed": model_of(
        1,
        pooling="first",
        learned=True,
        mixer="llama",
        mixer_options={"llama": {"causal": False, "positions": "none", "attention_bias": "all"}},
        **OF_VIT,
    ),
    "vit-blocks": model_of(
        0,
        mixer=["lion-lit", "tnl", "lion-s", "llama"],
        num_layers=4,
        norm_placement="both",
        mixer_options={"lion-lit": {"attention_bias": "qkv"}, "lion-s": {"attention_bias": "all"}},
        **OF_VIT,
    ),
    "lightnet": model_of(0, mixer="lightnet", mixer_options={"lightnet": {"causal": False, "learned_angles": True}}),
    "lion": model_of(mixer=["lion-lit", "lion-retnet", "lion-s", "lion-s"], num_layers=4, norm="rmsnorm"),
    "orders": model_of(
        mixer=["lion-retnet", "lion-s"],
        norm="rmsnorm",
        mixer_options={
            "lion-retnet": {"patch_order": "alternating", "scale": False},
            "lion-s": {"patch_order": "alternating", "gate": "enter", "eps": 0.1},
        },
    ),
    "orders of vectors": model_of(
        0,
        mixer="lion-s",
        norm="rmsnorm",
        mixer_options={"lion-s": {"patch_order": "alternating", "vector_decay": True}},
    ),
    "overlap": model_of(1, learned=True, overlap=1, mixer="lion-s", norm="rmsnorm"),
    "bi-rn": model_of(pooling="last", learned=True, mixer="bi-rn", norm="layernorm", intermediate_size=0),
    "causal": model_of(0, "last", mixer=["tnl", "lightnet"]),
}
CHANGED: dict[str, Any] = {
    "label_smoothing": 0.1,
    "augmentation": {
        "crop_scale": [0.3, 1.0],
        "horizontal_flip": 0.5,
        "rand_augment_ops": 2,
        "random_erasing": 0.5,
        "mixup_alpha": 0.8,
        "cutmix_alpha": 1.0,
    },
}
SOFT = {"label_smoothing": 0.1, "augmentation": {"mixup_alpha": 1.0}}
AXES = ({"tensor": 2}, {"pipeline": 2}, {"sequence": 2}, {"data": 2})


def pixels() -> NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, (IMAGES, *SHAPE), dtype=np.uint8)


def label_of(number: int) -> int:
    return number * number % LABELS


def write_store(path: Path) -> TokenStore:
    with StoreWriter(path, NoText(), image_shape=SHAPE, shard_tokens=64, chunk_tokens=16) as writer:
        source = writer.source("photos", documents={"image": ("uint8", (np.prod(SHAPE),)), "label": "int32"})
        for number, image in enumerate(pixels()):
            source.append([], num_bytes=image.size, documents={"image": image.ravel(), "label": label_of(number)})
        writer.finish({"sources": {"photos": {}}})
    return TokenStore(path)


def loader(
    path: Path, model: ModelConfig, *, seed: int = 0, task: dict[str, Any] | None = None, micro: int = 2, **layout: int
) -> TokenLoader:
    store = TokenStore(path)
    assert model.grid is not None
    return TokenLoader(
        store,
        sequence_length=model.grid.document_tokens,
        global_batch_size=8,
        micro_batch_size=micro,
        seed=seed,
        layout=LoaderLayout(**layout),
        targets=ClassifyImage(ClassifyImageConfig.model_validate(task or {}), model).targets(store, validation=False),
    )


def patches(image: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Row by row, each with its pixels row by row."""
    h, w = PATCH
    corners = itertools.product(range(0, SHAPE[0], h), range(0, SHAPE[1], w))
    return [image[top : top + h, left : left + w].ravel() for top, left in corners]


def overlapping(image: NDArray[np.uint8], size: tuple[int, int], overlap: int) -> list[list[int]]:
    """Pixel by pixel; those beyond the image are the nearest ones."""
    (height, width, channels), (h, w) = image.shape, size
    found = []
    for top, left in itertools.product(range(0, height, h), range(0, width, w)):
        places = itertools.product(range(top - overlap, top + h + overlap), range(left - overlap, left + w + overlap))
        nearest = [(min(max(row, 0), height - 1), min(max(column, 0), width - 1)) for row, column in places]
        found.append([int(image[row, column, channel]) for row, column in nearest for channel in range(channels)])
    return found


# ----- batches ------------------------------------------------------------------------------------------------------


def test_a_row_is_an_image_in_patches(tmp_path: Path) -> None:
    store, model = write_store(tmp_path / "store"), MODELS["vit"]
    whole, seen = loader(store.path, model), []
    parts = [loader(store.path, model, sequence_rank=rank, sequence_size=2) for rank in range(2)]
    for number in range(6):
        at = whole.step_tokens.after(number)
        samples, batches, halves = (
            whole.step_after(at),
            whole.batches_after(at),
            [one.batches_after(at) for one in parts],
        )
        for row, location in enumerate(samples.locations):
            batch, own = batches[row // 2], row % 2
            image = location.window
            # What `data samples` and `data trace` name.
            assert store.source("photos").document_at(int(samples.ranges[row].starts[0])) == image
            expected = np.stack([np.zeros(12)] * 2 + patches(pixels()[image]))
            assert np.array_equal(batch.tokens[own], expected)
            assert batch.loss_mask[own].tolist() == [0] * 9 + [1]
            assert batch.labels[own, -1] == label_of(image)
            seen.append(image)
            for name in ("tokens", "labels", "loss_mask", "positions"):
                joined = torch.cat([getattr(half[row // 2], name)[own] for half in halves])
                assert torch.equal(joined, getattr(batch, name)[own]), name
        assert batches[0].positions.tolist() == [list(range(10))] * 2
        assert [half[0].tokens_after.tolist() for half in halves] == [[5, 5], [0, 0]]  # type: ignore[union-attr]
    # Every image once in each epoch, in another order.
    assert sorted(seen[:IMAGES]) == sorted(seen[IMAGES:]) == list(range(IMAGES))
    assert seen[:IMAGES] != seen[IMAGES:]


@pytest.mark.parametrize(("size", "overlap"), [((2, 2), 1), ((2, 4), 3), ((4, 2), 0), ((1, 1), 5)])
def test_patches_that_overlap_have_the_pixels_around(size: tuple[int, int], overlap: int) -> None:
    images = pixels()[:3]
    found = as_patches(images, size, 1, overlap)
    assert not found[:, 0].any()
    assert found[:, 1:].tolist() == [overlapping(image, size, overlap) for image in images]


def test_a_run_reads_patches_that_overlap(tmp_path: Path) -> None:
    store, model = write_store(tmp_path / "store"), MODELS["overlap"]
    whole = loader(store.path, model)
    at = whole.step_tokens.after(0)
    samples, batch = whole.step_after(at), whole.batches_after(at)[0]
    for row in range(2):
        wanted = overlapping(pixels()[samples.locations[row].window], PATCH, 1)
        assert batch.tokens[row, 1:].tolist() == wanted


def test_images_go_on_where_they_stopped_and_not_with_other_patches(tmp_path: Path) -> None:
    path = write_store(tmp_path / "store").path
    one, again = loader(path, MODELS["vit"]), loader(path, MODELS["vit"], data_rank=1, data_size=2)
    one.next_step()
    again.load_state_dict(one.state_dict())
    for mine, theirs in zip(one.next_step()[1::2], again.next_step(), strict=True):
        assert torch.equal(mine.tokens, theirs.tokens)
    other = {**MODELS["vit"].model_dump(), "grid": {"shape": [1, 8], "leading_tokens": 2}}
    other["patches"] |= {"size": [4, 1]}
    with pytest.raises(UserError, match=r"patches of 2 x 2, 2 leading tokens before, .* patches of 4 x 1"):
        loader(path, ModelConfig.model_validate(other)).load_state_dict(one.state_dict())


def test_validation_has_every_image_once(tmp_path: Path) -> None:
    store, model = write_store(tmp_path / "store"), MODELS["lightnet"]
    found: list[int] = []
    for rank in range(2):
        batches = validation_batches(
            store.source("photos"),
            sequence_length=8,
            num_sequences=21,
            micro_batch_size=4,
            layout=LoaderLayout(data_rank=rank, data_size=2),
            targets=ClassifyImage(ClassifyImageConfig(), model).targets(store, validation=True),
        )
        for batch in batches:
            rows = zip(batch.tokens.numpy(), batch.loss_mask.sum(dim=1).tolist(), strict=True)
            counted = [row for row, count in rows if count]
            of_images = [np.stack(patches(image)) for image in pixels()]
            found += [next(n for n, image in enumerate(of_images) if np.array_equal(row, image)) for row in counted]
    assert sorted(found) == list(range(21))


def rows_of(batches: list[Batch]) -> dict[str, Tensor]:
    names = ("tokens", "labels", "loss_mask", "soft_labels")
    return {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}


def test_changed_images_are_the_same_on_every_layout_and_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="Pillow changes images")
    path, model = write_store(tmp_path / "store").path, MODELS["vit"]
    one = loader(path, model, task=CHANGED)
    steps = [rows_of(one.next_step()) for _ in range(6)]
    whole = torch.stack([step["tokens"] for step in steps])
    assert len(whole.flatten(0, 1).flatten(1).unique(dim=0)) == 48, "each image another one in the second epoch"
    for micro, ranks, sequence in ((1, 8, 1), (4, 2, 2), (8, 1, 5), (1, 2, 1)):
        task = {**CHANGED, "augmentation": {**CHANGED["augmentation"], "workers": micro}}
        for rank, part in itertools.product(range(ranks), range(sequence)):
            place = {"data_rank": rank, "data_size": ranks, "sequence_rank": part, "sequence_size": sequence}
            other = loader(path, model, task=task, micro=micro, **place)
            # Of a run that stopped behind the fourth step, in the second epoch.
            tokens = one.step_tokens.after(4)
            other.load_state_dict({**one.state_dict(), "tokens": tokens, "position": tokens})
            found = rows_of(other.next_step())
            own = [row for row in range(8) if row // micro % ranks == rank]
            columns = slice(part * 10 // sequence, (part + 1) * 10 // sequence)
            for name, expected in steps[4].items():
                cut = expected[own] if name == "soft_labels" else expected[own, columns]
                assert torch.equal(found[name], cut), (name, micro, place)
    for changes in ({"label_smoothing": 0.2}, {"augmentation": {"seed": 1}}, {"augmentation": {"mixup_alpha": 1.0}}):
        other = loader(path, model, task={**CHANGED, **changes})
        with pytest.raises(UserError, match=r"label smoothing 0.1, augmentation .*crop_scale \[0.3, 1.0\].* before"):
            other.load_state_dict(one.state_dict())


def test_mixed_pixels_and_labels_have_one_share(tmp_path: Path) -> None:
    path, model = write_store(tmp_path / "store").path, MODELS["lightnet"]
    flips = {"horizontal_flip": 0.5, "random_erasing": 0.5}
    apart = loader(path, model, task={"augmentation": flips})
    mixed = loader(path, model, task={"augmentation": {**flips, "mixup_alpha": 1.0}, "label_smoothing": 0.07})
    shares = []
    for _ in range(6):
        batches = apart.next_step()
        one, two = torch.cat([batch.tokens for batch in batches]).unflatten(0, (4, 2)).unbind(1)
        labels = torch.cat([batch.labels[:, -1] for batch in batches]).view(4, 2)
        found = rows_of(mixed.next_step())
        for pair in range(4):
            a, b = labels[pair].tolist()
            for own, other, row in ((0, 1, 2 * pair), (1, 0, 2 * pair + 1)):
                soft = (found["soft_labels"][row].double() - 0.01) / 0.93
                assert float(soft.sum()) == pytest.approx(1)
                assert int(found["labels"][row, -1]) == (a, b)[own]
                images = (one[pair].double(), two[pair].double())
                if a == b:
                    assert float(soft[a]) == pytest.approx(1)
                    continue
                share = float(soft[(a, b)[own]])
                assert float(soft[(a, b)[other]]) == pytest.approx(1 - share, abs=1e-6)
                expected = share * images[own] + (1 - share) * images[other]
                assert float((found["tokens"][row] - expected).abs().max()) <= 0.501
                shares.append(share)
    assert len(set(shares)) > 10


def test_validation_is_never_changed(tmp_path: Path) -> None:
    store, model = write_store(tmp_path / "store"), MODELS["vit"]
    task = ClassifyImage(ClassifyImageConfig.model_validate(CHANGED), model)
    plainly, changed = (
        list(
            validation_batches(
                store.source("photos"),
                sequence_length=10,
                num_sequences=IMAGES,
                micro_batch_size=4,
                layout=LoaderLayout(),
                targets=one.targets(store, validation=True),
            )
        )
        for one in (ClassifyImage(ClassifyImageConfig(), model), task)
    )
    assert all(torch.equal(one.tokens, two.tokens) for one, two in zip(plainly, changed, strict=True))
    assert all(two.soft_labels is None for two in changed)


def test_the_middle_of_larger_images_is_read(tmp_path: Path) -> None:
    smaller = ModelConfig.model_validate({**MODELS["vit"].model_dump(), "grid": {"shape": [1, 3], "leading_tokens": 2}})
    store = write_store(tmp_path / "store")
    ClassifyImage(ClassifyImageConfig(), smaller).check_store(smaller, store, ["photos"])
    made = loader(store.path, smaller)
    numbers = [location.window for location in made.step_after(0).locations]
    (first, *_) = made.next_step()
    middle = pixels()[numbers[0]][1:3, 1:7]
    assert np.array_equal(first.tokens[0, 2:].reshape(3, 2, 2, 3), middle.reshape(2, 3, 2, 3).swapaxes(0, 1))


# ----- the model ----------------------------------------------------------------------------------------------------


def engine_of(mesh: Mesh, model: ModelConfig, recompute: Any = "none") -> Engine:
    config = transformer_config(model, mesh, torch.float64, recompute=recompute)
    chunks = language_model_chunks(config, model, vocab_size=1, mesh=mesh)
    for chunk in chunks:
        draw_weights(chunk, seed=0, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
    return Engine(chunks, config, mesh, optimizer=AdamW(), num_sources=1)


def by_the_engine(
    rank: int, world_size: int, init_method: str, path: Path, cases: list[tuple[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    found = []
    for number, (name, axes) in enumerate(cases):
        place, layout = f"{init_method}-{number}", {axis: size for axis, size in axes.items() if axis != "recompute"}
        layout.pop("data", None)
        with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=place, **layout) as mesh:
            engine = engine_of(mesh, MODELS[name], axes.get("recompute", "none"))
            of_rank = {"sequence_rank": mesh.sequence_rank, "sequence_size": mesh.sequence}
            data = loader(path, MODELS[name], task=SOFT, data_rank=mesh.data_rank, data_size=mesh.data, **of_rank)
            batches: list[Batch] = [batch.to(mesh.device) for batch in data.next_step()]
            scores, sums = engine.forward_only(batches, top=(1, 5)), engine.forward_backward(batches)
            assert batches[0].soft_labels is not None
            assert abs(scores.loss - sums.loss) < 1e-9
            found.append({"loss": sums.loss, "tokens": sums.tokens, "correct": scores.correct})
            found[-1] |= {"gradients": parity.gradients(engine), "by_source": sums.by_source}
            if world_size == 1:
                # The chosen weights are alike in places; these are not.
                module: Any = engine.module
                plain.disturb(module)
                found[-1]["disturbed"] = disturbed(module, batches[0])
    return found


def disturbed(module: Any, batch: Batch) -> dict[str, Any]:
    module.zero_grad()
    log_probability, last = module.label_log_probability(
        module(batch.tokens, batch.positions, hidden_only=True), batch.positions
    )
    assert last.tolist() == [len(row) * (n + 1) - 1 for n, row in enumerate(batch.positions)]
    assert batch.soft_labels is not None
    how = {"loss_mask": batch.loss_mask, "soft_labels": batch.soft_labels}
    losses = module(batch.tokens, batch.positions, batch.labels, **how)[:, -1]
    names = dict(named_parameters(module))
    gradients = torch.autograd.grad(losses @ torch.tensor([0.3, 1.1], dtype=torch.float64), list(names.values()))
    return {
        "logits": log_probability.detach(),
        "losses": losses.detach(),
        "gradients": dict(zip(names, gradients, strict=True)),
        "weights": plain.weights_of(module),
        "tokens": batch.tokens,
        "soft_labels": batch.soft_labels,
    }


def relation(model: ModelConfig, x: Tensor, weights: dict[str, Tensor], layer: int) -> Tensor:
    """BiRN, summed over all pairs: its linear form has norms on both sides and behind the sum."""
    options: Any = model.layer_options(layer)

    def layer_norm(y: Tensor) -> Tensor:
        centered = y - y.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + options.eps).sqrt()

    a, b = x @ weights["a_proj.weight"].T + weights["a_proj.bias"], x @ weights["b_proj.weight"].T
    o = torch.exp(layer_norm(a)[:, None] + layer_norm(b)[None]).mean(dim=1)
    # ε is relative to the largest channel.
    o = layer_norm(o / o.detach().amax(-1, keepdim=True))
    return o @ weights["out_proj.weight"].T + weights["out_proj.bias"]


def mix(model: ModelConfig, x: Tensor, weights: dict[str, Tensor], layer: int) -> Tensor:
    name, own = model.layers[layer], model.layer_options(layer)
    whole = name == "lightnet" and not getattr(own, "causal", True)
    kinds = {"bi-rn": relation, "lightnet": mixers.lightnet_whole if whole else mixers.lightnet}
    kinds |= {"llama": mixers.llama, "tnl": mixers.tnl, "cosformer2": mixers.cosformer2}
    kinds |= {"decay-attention": mixers.decay_attention}
    found: Tensor = kinds.get(name, mixers.lion)(model, x, weights, layer)
    return found


def plainly(model: ModelConfig, figures: dict[str, Any]) -> dict[str, Any]:
    """Each image by itself: its patches, leading vectors, positions, layers, pooling, logits."""
    assert model.head is not None and model.grid is not None
    leaves = {name: weight.clone().requires_grad_() for name, weight in figures["weights"].items()}
    repeats = figures["tokens"].size(-1) // 3
    mean, std = (torch.tensor(values * repeats, dtype=torch.float64) for values in ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7]))
    logits = []
    for image in figures["tokens"]:
        scaled = (image[model.grid.leading_tokens :].double() / 255 - mean) / std
        x = scaled @ leaves["embedding.patches.weight"].T + leaves["embedding.patches.bias"]
        if model.grid.leading_tokens:
            x = torch.cat([leaves["embedding.patches.leading"], x])
        if "embedding.positions.table" in leaves:
            x = x + leaves["embedding.positions.table"]
        if "embedding.tpe.decay_logit" in leaves:
            x = plain.grid_toeplitz(model, x, leaves)
        states = plain.document_states(model, leaves, x, functools.partial(mix, model))
        pooled = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[model.head.pooling]
        logits.append(leaves["output_layer.weight"] @ pooled + leaves.get("output_layer.bias", 0.0))
    found = torch.log_softmax(torch.stack(logits), dim=-1)
    losses = -(figures["soft_labels"].double() * found).sum(-1)
    loss = losses @ torch.tensor([0.3, 1.1], dtype=torch.float64)
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {
        "logits": found.detach(),
        "losses": losses.detach(),
        "gradients": dict(zip(leaves, gradients, strict=True)),
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("images") / "store").path


@pytest.fixture(scope="module")
def one_rank(run_ranks: RunRanks, store: Path) -> dict[str, dict[str, Any]]:
    (found,) = run_ranks(by_the_engine, 1, store, [(name, {}) for name in MODELS], timeout_s=300)
    return dict(zip(MODELS, found, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_plain_one(one_rank: dict[str, dict[str, Any]], name: str) -> None:
    figures = one_rank[name]["disturbed"]
    plain.assert_equal(figures, plainly(MODELS[name], figures))
    shapes = {key: tuple(weight.shape) for key, weight in figures["weights"].items()}
    assert shapes == parameter_shapes(MODELS[name])


def test_two_orders_of_patches_on_two_sequence_ranks(
    run_ranks: RunRanks, store: Path, one_rank: dict[str, dict[str, Any]]
) -> None:
    """Half of an image's tokens on each rank, which is half of no order."""
    cases = [("orders", {"sequence": 2}), ("orders of vectors", {"sequence": 2, "recompute": "full"})]
    for found in run_ranks(by_the_engine, 2, store, cases, timeout_s=300):
        for (name, _), one in zip(cases, found, strict=True):
            assert one["loss"] == pytest.approx(one_rank[name]["loss"], rel=1e-12)
            for key, gradient in one["gradients"].items():
                assert parity.error(gradient, one_rank[name]["gradients"][key]) < 1e-10, (name, key)


@pytest.mark.long
def test_two_ranks_equal_one(run_ranks: RunRanks, store: Path, one_rank: dict[str, dict[str, Any]]) -> None:
    """Every axis and every model; loss, top-1 and top-5, and every gradient."""
    drawn = drawing.covering("axes of images", list(MODELS), AXES, ({}, {"recompute": "full"}))
    # Tensor and sequence ranks share the tokens of an image; with one leading token these are odd.
    odd = {name for name, model in MODELS.items() if model.grid is not None and model.grid.document_tokens % 2}
    cases = [
        (name, {**axes, **more})
        for name, axes, more in drawn
        if name not in odd or not axes.keys() & {"tensor", "sequence"}
    ]
    ranks = run_ranks(by_the_engine, 2, store, cases, timeout_s=600)
    for number, (name, axes) in enumerate(cases):
        expected, compared = one_rank[name], set()
        for found in ranks:
            one = found[number]
            assert (one["tokens"], one["correct"]) == (8, expected["correct"]), (name, axes)
            assert one["loss"] == pytest.approx(expected["loss"], rel=1e-12), (name, axes)
            assert one["by_source"][0][1] == 8
            for key, gradient in one["gradients"].items():
                assert parity.error(gradient, expected["gradients"][key]) < 1e-10, (name, axes, key)
            compared |= one["gradients"].keys()
        assert compared == expected["gradients"].keys()
    top = [one["correct"] for one in one_rank.values()]
    assert all(first <= five <= 8 for first, five in top)
    assert any(first < five < 8 for first, five in top)


def of_vit(weights: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Weights, or gradients, of our ViT under the names of ``ViTForImageClassification``, each cut by hand."""
    d, (h, w) = model.hidden_size, PATCH
    found = {
        "vit.embeddings.cls_token": weights["embedding.patches.leading"][None],
        "vit.embeddings.position_embeddings": weights["embedding.positions.table"][None],
        # A convolution has the channels before the pixels.
        "vit.embeddings.patch_embeddings.projection.weight": weights["embedding.patches.weight"]
        .view(d, h, w, 3)
        .permute(0, 3, 1, 2),
        "vit.embeddings.patch_embeddings.projection.bias": weights["embedding.patches.bias"],
    }
    for kind in ("weight", "bias"):
        found[f"vit.layernorm.{kind}"] = weights[f"decoder.final_layernorm.{kind}"]
        found[f"classifier.{kind}"] = weights[f"output_layer.{kind}"]
        for layer in range(model.num_layers):
            ours, theirs = f"decoder.layers.{layer}.", f"vit.layers.{layer}."
            both = weights[f"{ours}self_attention.kv_proj.{kind}"].unflatten(0, (model.num_heads, 2, -1))
            found |= {
                f"{theirs}attention.q_proj.{kind}": weights[f"{ours}self_attention.q_proj.{kind}"],
                f"{theirs}attention.k_proj.{kind}": both[:, 0].flatten(0, 1),
                f"{theirs}attention.v_proj.{kind}": both[:, 1].flatten(0, 1),
                f"{theirs}attention.o_proj.{kind}": weights[f"{ours}self_attention.out_proj.{kind}"],
                f"{theirs}layernorm_before.{kind}": weights[f"{ours}input_layernorm.{kind}"],
                f"{theirs}layernorm_after.{kind}": weights[f"{ours}pre_mlp_layernorm.{kind}"],
                f"{theirs}mlp.fc1.{kind}": weights[f"{ours}mlp.linear_fc1.{kind}"],
                f"{theirs}mlp.fc2.{kind}": weights[f"{ours}mlp.linear_fc2.{kind}"],
            }
    return found


def test_vit_is_that_of_transformers(one_rank: dict[str, dict[str, Any]]) -> None:
    """Logits and every gradient, in fp64, but that pixels and norms of theirs are read in another order of sums."""
    vit, model = pytest.importorskip("transformers.models.vit.modeling_vit"), MODELS["vit-printed"]
    figures = one_rank["vit-printed"]["disturbed"]
    config = vit.ViTConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        intermediate_size=model.intermediate_size,
        layer_norm_eps=model.norm_eps,
        image_size=SHAPE[:2],
        patch_size=PATCH,
        num_labels=LABELS,
    )
    theirs = vit.ViTForImageClassification(config).double()
    theirs.load_state_dict(of_vit(figures["weights"], model))
    images = torch.stack([from_patches(image[1:]) for image in figures["tokens"]]).double() / 255
    mean, std = (torch.tensor(values).double() for values in ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7]))
    logits = theirs(((images - mean) / std).permute(0, 3, 1, 2)).logits.log_softmax(-1)
    torch.testing.assert_close(logits.detach(), figures["logits"], rtol=1e-5, atol=1e-5)
    losses = -(figures["soft_labels"].double() * logits).sum(-1)
    (losses @ torch.tensor([0.3, 1.1], dtype=torch.float64)).backward()
    expected = {name: weight.grad for name, weight in theirs.named_parameters()}
    found = of_vit(figures["gradients"], model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=lambda text, n=name: n + text)


def from_patches(rows: Tensor) -> Tensor:
    """The image (h, w, 3) of its patches."""
    (h, w), (down, across) = PATCH, GRID
    return rows.view(down, across, h, w, 3).transpose(1, 2).reshape(SHAPE)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        # LightNet's table 14, and timm's DeiT, whose weights these are one by one.
        *(("lightnet-imagenet-tiny", 6.0), ("lightnet-imagenet-small", 22.6), ("lightnet-imagenet-base", 87.7)),
        *(("vit-imagenet-tiny", 5.717416), ("vit-imagenet-small", 22.050664), ("vit-imagenet-base", 86.567656)),
    ],
)
def test_published_sizes_have_the_printed_counts(name: str, printed: float) -> None:
    config = load(name)
    digits = len(str(printed).partition(".")[2])
    assert round(sum(parameter_terms(config.model).values()) / 1e6, digits) == printed
    assert config.model.image_shape == (224, 224, 3)


@pytest.mark.parametrize(("size", "printed"), [("tiny", 5.5), ("small", 21.7)])
@pytest.mark.parametrize("mixer", ["vit", "lion-lit", "lion-retnet", "lion-s", "lion-s-alternating"])
def test_lions_printed_sizes_are_those_of_100_classes(mixer: str, size: str, printed: float) -> None:
    """Of its section 5.3; LION-LIT and LION-RetNet, small, are 21.63."""
    config = load(f"{mixer}-imagenet-{size}", ["model.head.num_labels=100"])
    assert sum(parameter_terms(config.model).values()) / 1e6 == pytest.approx(printed, abs=0.08)


def test_orders_of_patches_by_hand() -> None:
    """The pictures of LION's figure 7, of 3 rows and 2 columns behind a class token."""
    found = alternating_orders(GridConfig(shape=[3, 2], leading_tokens=1)).tolist()
    assert found == [[0, 1, 2, 4, 3, 5, 6], [0, 1, 3, 5, 6, 4, 2]]


OTHER_GRID = [3, 5]


def at_another_size(rank: int, world_size: int, init_method: str) -> dict[str, dict[str, Any]]:
    """Log-probabilities of random images of another size than the models are made for, by each model."""
    found = {}
    for number, (name, model) in enumerate(MODELS.items()):
        assert model.grid is not None and model.patches is not None
        with start_mesh(device="cpu", init_method=f"{init_method}-{number}") as mesh:
            module: Any = engine_of(mesh, model).module
            plain.disturb(module)
            weights = plain.weights_of(module)
            set_grid(module, OTHER_GRID)
            generator = np.random.default_rng(number)
            images = generator.integers(0, 256, (2, 6, 10, 3)).astype(np.uint8)
            leading, overlap = model.grid.leading_tokens, model.patches.overlap
            tokens = torch.from_numpy(as_patches(images, PATCH, leading, overlap))
            positions = torch.arange(tokens.size(1)).repeat(2, 1)
            with torch.no_grad():
                hidden = module(tokens, positions, hidden_only=True)
                logits, _ = module.label_log_probability(hidden, positions)
            found[name] = {"logits": logits, "weights": weights, "tokens": tokens}
    return found


def bicubic(row: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """(n, d) -> (size, d): Keys' kernel with a = -3/4 around the middle of each new cell, edges repeated."""
    n, a, found = len(row), -0.75, []
    for cell in range(size):
        middle = (cell + 0.5) * n / size - 0.5
        total = np.zeros_like(row[0])
        for source in range(math.floor(middle) - 1, math.floor(middle) + 3):
            x = abs(middle - source)
            near, far = (a + 2) * x**3 - (a + 3) * x**2 + 1, a * (x**3 - 5 * x**2 + 8 * x - 4)
            total += (near if x <= 1 else far) * row[min(max(source, 0), n - 1)]
        found.append(total)
    return np.stack(found)


@pytest.fixture(scope="module")
def other_sizes(run_ranks: RunRanks) -> dict[str, dict[str, Any]]:
    (found,) = run_ranks(at_another_size, 1, timeout_s=300)
    return found  # type: ignore[no-any-return]


def test_other_sizes_have_interpolated_positions_and_coordinates(other_sizes: dict[str, dict[str, Any]]) -> None:
    for name, figures in other_sizes.items():
        trained, model = MODELS[name], MODELS[name].on_grid(OTHER_GRID)
        assert model.image_shape == (6, 10, 3)
        assert trained.grid is not None
        leading, key = trained.grid.leading_tokens, "embedding.positions.table"
        weights = dict(figures["weights"])
        if key in weights:
            table = weights[key].numpy()
            cells = table[leading:].reshape(*GRID, -1)
            rows = np.stack([bicubic(column, OTHER_GRID[0]) for column in cells.swapaxes(0, 1)], axis=1)
            cells = np.stack([bicubic(row, OTHER_GRID[1]) for row in rows])
            weights[key] = torch.from_numpy(np.concatenate([table[:leading], cells.reshape(15, -1)]))
        even = torch.full((2, LABELS), 1 / LABELS)
        expected = plainly(model, {**figures, "weights": weights, "soft_labels": even})
        assert float((figures["logits"] - expected["logits"]).abs().max()) < 1e-10, name


def test_positions_of_other_sizes_are_those_of_transformers() -> None:
    """Of square images, which alone it interpolates from."""
    vit = pytest.importorskip("transformers.models.vit.modeling_vit")
    theirs = vit.ViTEmbeddings(vit.ViTConfig(hidden_size=16, image_size=8, patch_size=2)).double()
    table = torch.randn(17, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs.load_state_dict({**theirs.state_dict(), "position_embeddings": table[None]})
    for rows, columns in ((3, 5), (7, 4), (4, 4)):
        expected = theirs.interpolate_pos_encoding(torch.zeros(1, 1 + rows * columns, 16), 2 * rows, 2 * columns)
        found = interpolated(table, GridConfig(shape=[4, 4], leading_tokens=1), [rows, columns])
        torch.testing.assert_close(found, expected[0].detach(), rtol=1e-12, atol=1e-12)


# ----- what does not fit --------------------------------------------------------------------------------------------


RUN: dict[str, Any] = {
    "model": MODELS["vit"].model_dump(),
    "task": {"name": "classify-image"},
    "data": {"store": Path("store"), "sequence_length": 10},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 2, "global_batch_size": 4},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"sequence_length": 20}}, "data.sequence_length = 20: an image has 10 tokens"),
        ({"data": {"packing": "whole"}}, 'data.packing = "whole": a sequence is one image'),
        ({"data": {"packing": "joined"}}, 'data.packing = "joined": a sequence is one image; use "concat"'),
        ({"task": {"name": "classify"}}, 'task.name = "classify": model.patches, the inputs of images, is set'),
        ({"model": {"patches": None}}, "model.vocab_size is missing"),
        ({"model": {"patches": None, "vocab_size": 9}}, "model.patches, the inputs of images, is missing; add"),
        ({"model": {"vocab_size": 9}}, "model.vocab_size = 9 with model.patches"),
        ({"model": {"grid": None}}, "model.patches with no model.grid"),
        ({"model": {"grid": {"shape": [2, 2, 2]}}}, r"model.patches with model.grid.shape = \[2, 2, 2\]"),
        ({"model": {"head": None}}, "model.patches without model.head"),
        ({"model": {"patches": {"size": [2, 2], "mean": [0.1, 0.2]}}}, "model.patches.mean has 2 numbers for 3"),
        (
            {"model": {"patches": {"size": [2, 2], "overlap": 1}, "head": None, "diffusion": {"num_labels": 2}}},
            "model.patches.overlap = 1 with model.diffusion",
        ),
        ({"model": {"embedding_multiplier": 2.0}}, "model.embedding_multiplier = 2.0 with model.patches"),
        (
            {"model": {"mixer": "lion-lit", "mixer_options": {"lion-lit": {"patch_order": "alternating"}}}},
            'patch_order = "alternating": without decays all orders give the same',
        ),
    ],
)
def test_configurations_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    RunConfig.model_validate(RUN)
    table = {section: {**RUN.get(section, {}), **changes.get(section, {})} for section in {**RUN, **changes}}
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(table)


def test_stores_that_do_not_fit_are_named(store: Path) -> None:
    opened, task = TokenStore(store), ClassifyImage(ClassifyImageConfig(), MODELS["vit"])
    task.check_store(MODELS["vit"], opened, ["photos"])
    grey = ModelConfig.model_validate({**RUN["model"], "patches": {"size": [2, 2], "channels": 1}})
    message = r"has images of 4 x 8 x 3 .* reads images of 4 x 8 x 1 .*--images 4x8x1, or larger, or change"
    with pytest.raises(UserError, match=message):
        task.check_store(grey, opened, ["photos"])
    few = ModelConfig.model_validate({**RUN["model"], "head": {"num_labels": 3}})
    with pytest.raises(UserError, match=r"document 2 has the label 4, but model.head.num_labels = 3"):
        task.check_store(few, opened, ["photos"])


def test_plan_counts_patches() -> None:
    config = RunConfig.model_validate({**RUN, "parallel": {"tensor": 2, "pipeline": 2}})
    memory = rank_memory(config, check_layout(config, 4), 0)
    first, _ = rank_parameters(MODELS["vit"], tensor=2, pipeline=2)
    # Half of the layers' weights, of patches with their bias, of the leading vectors, of positions; norms whole.
    layer = 4 * 16 * 16 + 3 * 16 * 24
    assert memory.parameters == first == (layer + 16 * 12 + 16 + 2 * 16 + 10 * 16) // 2 + 2 * 16
