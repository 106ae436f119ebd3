"""What is predicted of many documents equals what is of each by itself, on any layout, in fp64."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightscale.config.model import ModelConfig
from lightscale.evaluation.inference.predictions import Predictor
from lightscale.evaluation.inference.requests import Ids

parity = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "parity.py")))
pytestmark = pytest.mark.timeout(600)
RunRanks = Callable[..., list[Any]]
MASK, LABELS, TOP = parity.VOCAB_SIZE, 5, 3
# Ranks import this module: they have these models too.
for _pooling in ("mean", "last"):
    parity.MODELS[f"labels-{_pooling}"] = ModelConfig.model_validate(
        {**parity.MODELS["bidirectional"].model_dump(), "head": {"num_labels": LABELS, "pooling": _pooling}}
    )
parity.MODELS["matches"] = ModelConfig.model_validate(
    {**parity.MODELS["bidirectional"].model_dump(), "head": {"num_labels": LABELS, "pairs": True, "bias": True}}
)
IMAGES, TOKENS, LEADING, CHANNELS = 11, 8, 2, 3
parity.MODELS["images"] = ModelConfig.model_validate(
    {
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 4,
        "intermediate_size": 24,
        "mixer": ["lion-lit", "lion-s"],
        "mixer_options": {"lion-s": {"patch_order": "alternating"}},
        "head": {"num_labels": LABELS},
        "grid": {"shape": [2, 3], "leading_tokens": LEADING},
        "patches": {"size": [2, 2], "channels": 1},
    }
)
MODELS = {"images": ("patches", "mean", "classes"), "bidirectional": ("fill", "mean"), "tnl": ("mean", "last"),
          "labels-mean": ("classes", "last"), "labels-last": ("classes",), "matches": ("pairs",)}  # fmt: skip
LAYOUTS = {
    2: [
        "bidirectional tensor=2",
        "bidirectional sequence=2",
        "bidirectional pipeline=2",
        "bidirectional",
        "labels-mean tensor=2",
        "labels-mean sequence=2",
        "labels-last pipeline=2",
        "matches tensor=2",
        "matches sequence=2",
        "matches",
        "tnl sequence=2",
        "tnl",
        "images tensor=2",
        "images sequence=2",
        "images pipeline=2",
        "images",
    ],
    4: [
        "images tensor=2 sequence=2",
        "bidirectional tensor=2 sequence=2",
        "labels-mean sequence=4",
        "matches sequence=4",
        "matches pipeline=2 sequence=2",
        "labels-mean sequence=2",
        "tnl tensor=2",
    ],
}


def documents() -> list[Ids]:
    """Short ones and some that are longer than a row, with masks anywhere, side by side, and none."""
    generator = np.random.default_rng(3)
    found = []
    for length in (2, 150, 7, 64, 1, 33, 90, 12, 5, 5):
        ids = generator.integers(0, parity.VOCAB_SIZE, length).astype(np.int32)
        ids[1:][generator.random(length - 1) < 0.2] = MASK
        found.append(ids)
    found[3][60:64] = MASK
    return found


def second(ids: Ids) -> int:
    """Where the second of a pair begins."""
    return 1 + len(ids) // 3


def images() -> np.ndarray:
    """More than fill whole passes, in patches."""
    return np.random.default_rng(5).integers(0, 256, (IMAGES, TOKENS, 4), dtype=np.uint8)


def predicted_of_images(predictor: Predictor, kind: str) -> list[np.ndarray]:
    match kind:
        case "patches":
            return list(predictor.embed_patches(list(images()), LEADING, CHANNELS))
        case "classes":
            return list(predictor.classify(list(images()))[:, None])
        case _:
            return list(predictor.embed(list(images()), "mean")[:, None])


def predicted(predictor: Predictor, kind: str) -> list[np.ndarray]:
    """Of each document, (m, width)."""
    match kind:
        case "fill":
            return [np.concatenate(one, axis=1) for one in predictor.fill(documents(), MASK, TOP)]
        case "classes":
            return list(predictor.classify(documents())[:, None])
        case "pairs":
            pairs = [ids for ids in documents() if len(ids) > 1]
            return list(predictor.classify(pairs, [second(ids) for ids in pairs])[:, None])
        case _:
            return list(predictor.embed(documents(), "mean" if kind == "mean" else "last")[:, None])


def by_itself(model: Any, ids: Ids, kind: str) -> np.ndarray:
    """The same by all states of one document alone."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        hidden = model(tokens, torch.arange(len(ids))[None], hidden_only=True)[:, 0]
        if kind == "fill":
            rows = model.embedding.word_embeddings.weight[: parity.VOCAB_SIZE]
            values, best = torch.log_softmax(hidden[tokens[0] == MASK] @ rows.T, -1).sort(-1, descending=True)
            return torch.cat([values[:, :TOP], best[:, :TOP].double()], dim=1).numpy()
        pooling = model.model.head.pooling if kind == "classes" else kind
        vector = hidden.mean(0) if pooling == "mean" else hidden[-1]
        if kind == "classes":
            vector = torch.log_softmax(model.output_layer.weight @ vector, -1)
        return vector[None].numpy()


def pair_by_itself(model: Any, ids: Ids) -> np.ndarray:
    """The same by the states of two documents, each alone."""
    with torch.no_grad():
        one, two = (
            model(torch.from_numpy(part.astype(np.int64))[None], torch.arange(len(part))[None], hidden_only=True)[
                :, 0
            ].mean(0)
            for part in (ids[: second(ids)], ids[second(ids) :])
        )
        head = model.output_layer
        inner = torch.cat([one, two, one * two, one - two]) @ head.hidden_weight.T + head.hidden_bias
        logits = head.weight @ torch.nn.functional.gelu(inner) + head.bias
        return torch.log_softmax(logits, -1)[None].numpy()


def image_by_itself(model: Any, patches: np.ndarray, kind: str) -> np.ndarray:
    """The same of one image."""
    with torch.no_grad():
        hidden = model(torch.from_numpy(patches)[None], torch.arange(TOKENS)[None], hidden_only=True)[:, 0]
        if kind == "patches":
            return np.array(hidden[LEADING:, :CHANNELS])
        vector = hidden.mean(0)
        if kind == "classes":
            vector = torch.log_softmax(model.output_layer.weight @ vector, -1)
        return vector[None].numpy()


def predict(rank: int, world_size: int, init_method: str, folder: Path, cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text, case, mesh in parity.on_meshes(cases, rank, world_size, init_method):
        with parity.engine_in(mesh, case, torch.float64) as engine:
            weights = folder / f"{case.model}.pt"
            if world_size == 1:
                torch.save(parity.disturbed(engine), weights)
            parity.set_weights(engine, torch.load(weights))
            model = engine.module.eval()
            predictor = Predictor(model, engine.mesh, row_tokens=64)
            for kind in MODELS[case.model]:
                if case.model == "images":
                    found[f"{text} / {kind}"] = predicted_of_images(predictor, kind)
                    if world_size == 1:
                        found[f"{text} / {kind} alone"] = [image_by_itself(model, one, kind) for one in images()]
                    continue
                found[f"{text} / {kind}"] = predicted(predictor, kind)
                if world_size == 1 and kind == "pairs":
                    found[f"{text} / {kind} alone"] = [
                        pair_by_itself(model, ids) for ids in documents() if len(ids) > 1
                    ]
                elif world_size == 1:
                    found[f"{text} / {kind} alone"] = [by_itself(model, ids, kind) for ids in documents()]
    return found


def check(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert [one.shape for one in found] == [one.shape for one in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def one_process(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("weights")
    (found,) = run_ranks(predict, 1, folder, list(MODELS))
    return folder, found


def test_rows_of_many_documents_leave_no_trace(one_process: tuple[Path, dict[str, Any]]) -> None:
    _, found = one_process
    for model, kinds in MODELS.items():
        for kind in kinds:
            check(found[f"{model} / {kind}"], found[f"{model} / {kind} alone"])
    numbers = [len(one) for one in found["bidirectional / fill"]]
    assert sum(numbers) > 30
    assert 0 in numbers


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_layout_predicts_alike(
    run_ranks: RunRanks, one_process: tuple[Path, dict[str, Any]], world_size: int
) -> None:
    folder, expected = one_process
    for rank in run_ranks(predict, world_size, folder, LAYOUTS[world_size]):
        for name, found in rank.items():
            text, kind = name.split(" / ")
            check(found, expected[f"{text.split()[0]} / {kind}"])
