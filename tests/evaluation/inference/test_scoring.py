"""Answers to requests equal those of each request by itself: in any mixture, on any layout, with every mixer."""

import functools
import itertools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightscale.evaluation.inference.requests import (
    Ids,
    Likelihood,
    LogLikelihood,
    Request,
    RollingLogLikelihood,
    TokenLikelihoods,
    windows,
)
from lightscale.evaluation.inference.scoring import Scorer, ScoringSettings

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))
parity = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "parity.py")))
# A machine that others use too is slow at times.
pytestmark = pytest.mark.timeout(600)
RunRanks = Callable[..., list[Any]]
MODELS = parity.WRITING
DRAWN: list[str] = drawing.some("models that write", MODELS, 5)
# Short rows, so that there are many, and documents that are longer than one.
SETTINGS = {
    "shared": ScoringSettings(row_tokens=64, least_shared=5),
    "not shared": ScoringSettings(row_tokens=64, least_shared=None),
    "long rows": ScoringSettings(row_tokens=1000, least_shared=2),
}
TWO, FOUR = ["tensor=2", "pipeline=2", "sequence=2", ""], ["tensor=2 sequence=2", "tensor=2 pipeline=2", "pipeline=2"]


def random_ids(generator: np.random.Generator, least: int, most: int) -> Ids:
    return generator.integers(0, parity.VOCAB_SIZE, generator.integers(least, most + 1)).astype(np.int32)


def mixture(seed: int) -> list[Request]:
    """Questions with several answers behind a prompt of several examples, texts short and long, in any order."""
    generator = np.random.default_rng(seed)
    ids = functools.partial(random_ids, generator)
    requests: list[Request] = [
        RollingLogLikelihood(ids=ids(150, 200)),
        RollingLogLikelihood(ids=ids(60, 70), window=32, stride=8),
        RollingLogLikelihood(ids=ids(60, 70), window=40),
        RollingLogLikelihood(ids=ids(1, 1)),
        RollingLogLikelihood(ids=ids(2, 2)),
    ]
    for least, most in ((20, 30), (70, 80)):
        examples = ids(least, most)
        for _ in range(2):
            question = np.concatenate([examples, ids(1, 25)])
            requests += [LogLikelihood(context=question, continuation=ids(1, 6)) for _ in range(2)]
            # The same continuation again, and one that begins another.
            requests.append(requests[-1])
            requests.append(
                LogLikelihood(context=question, continuation=np.concatenate([requests[-1].continuation, ids(1, 3)]))
            )
    requests += [LogLikelihood(context=ids(1, 60), continuation=ids(1, 40)) for _ in range(4)]
    # A context that is the beginning of another document, scored from there on.
    requests.append(LogLikelihood(context=requests[0].ids[:50], continuation=requests[0].ids[50:60]))
    return [requests[index] for index in generator.permutation(len(requests))]


def alone(model: Any, ids: Ids) -> tuple[np.ndarray, np.ndarray]:
    """log p of ids[1:], and which id is the most probable there, by all logits of one document."""
    tokens = torch.from_numpy(ids[:-1].astype(np.int64))[None]
    with torch.no_grad():
        logits = model(tokens, torch.arange(tokens.size(1))[None])[0, :, : parity.VOCAB_SIZE]
    log_probability = torch.log_softmax(logits, dim=-1)
    labels = torch.from_numpy(ids[1:].astype(np.int64))
    return log_probability.gather(-1, labels[:, None])[:, 0].numpy(), logits.argmax(dim=-1).numpy()


def expected(model: Any, request: Request) -> list[float]:
    """The numbers of the answer, by ``alone``."""
    if isinstance(request, LogLikelihood):
        ids = np.concatenate([request.context, request.continuation])
        first = len(request.context)
        values, best = alone(model, ids)
        return [float(values[first - 1 :].sum()), float((best[first - 1 :] == ids[first:]).all())]
    assert isinstance(request, RollingLogLikelihood)
    found: list[float] = []
    for begin, scored, end in windows(len(request.ids) - 1, request.window, request.stride):
        if end > scored:
            found += alone(model, request.ids[begin:end])[0][scored - begin - 1 :].tolist()
    return found


def numbers(answer: Any) -> list[float]:
    if isinstance(answer, Likelihood):
        return [answer.log_probability, float(answer.is_greedy)]
    assert isinstance(answer, TokenLikelihoods)
    return list(answer.log_probability)


def score(rank: int, world_size: int, init_method: str, folder: Path, cases: list[str], seeds: range) -> dict[str, Any]:
    """What this rank finds of each case; on one process the numbers of each request by itself too."""
    found: dict[str, Any] = {}
    for text, case, mesh in parity.on_meshes(cases, rank, world_size, init_method):
        with parity.engine_in(mesh, case, torch.float64) as engine:
            # What one process makes, all layouts take.
            weights = folder / f"{case.model}.pt"
            if world_size == 1:
                torch.save(parity.disturbed(engine), weights)
            parity.set_weights(engine, torch.load(weights))
            model = engine.module.eval()
            # On several ranks what differs is the layout.
            for name in SETTINGS if world_size == 1 else ["shared"]:
                settings = SETTINGS[name]
                for seed in seeds:
                    scorer = Scorer(model, engine.mesh, settings=settings)
                    answers = [numbers(answer) for answer in scorer.answer(mixture(seed))]
                    found[f"{text} / {name} / {seed}"] = (answers, scorer.work)
            if world_size == 1:
                for seed in seeds:
                    found[f"{text} / alone / {seed}"] = [expected(model, request) for request in mixture(seed)]
    return found


def error(answers: list[list[float]], reference: list[list[float]]) -> float:
    assert [len(one) for one in answers] == [len(one) for one in reference]
    return max(
        abs(a - b) for one, other in zip(answers, reference, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def one_process(run_ranks: RunRanks, folder: Path) -> dict[str, Any]:
    (found,) = run_ranks(score, 1, folder, DRAWN, range(1), timeout_s=400)
    return dict(found)


@pytest.fixture(scope="module")
def every_model(run_ranks: RunRanks, folder: Path) -> dict[str, Any]:
    (found,) = run_ranks(score, 1, folder, MODELS, range(1), timeout_s=400)
    return dict(found)


def assert_as_each_alone(found: dict[str, Any], model: str, seeds: range) -> None:
    for seed in seeds:
        for name in SETTINGS:
            assert error(found[f"{model} / {name} / {seed}"][0], found[f"{model} / alone / {seed}"]) < 1e-10


@pytest.mark.parametrize("model", DRAWN)
def test_a_request_is_answered_alike_in_any_mixture(one_process: dict[str, Any], model: str) -> None:
    assert_as_each_alone(one_process, model, range(1))


@pytest.mark.soak
def test_a_request_is_answered_alike_in_many_mixtures(run_ranks: RunRanks, tmp_path: Path) -> None:
    (found,) = run_ranks(score, 1, tmp_path, MODELS, range(1, 5), timeout_s=500)
    for model in MODELS:
        assert_as_each_alone(found, model, range(1, 5))


@pytest.mark.parametrize("model", DRAWN)
def test_shared_prefixes_are_run_once(one_process: dict[str, Any], model: str) -> None:
    shared, apart = (one_process[f"{model} / {name} / 0"][1] for name in ("shared", "not shared"))
    assert shared.asked_tokens == apart.asked_tokens <= apart.run_tokens
    assert shared.run_tokens < 0.6 * apart.run_tokens


def assert_as_one_process(
    run_ranks: RunRanks, every_model: dict[str, Any], folder: Path, world_size: int, cases: list[str]
) -> None:
    ranks = run_ranks(score, world_size, folder, cases, range(1), timeout_s=200 + 20 * len(cases))
    for found in ranks:
        for key, (answers, _) in found.items():
            case, name, seed = key.split(" / ")
            assert error(answers, every_model[f"{case.split()[0]} / alone / {seed}"]) < 1e-10, (case, name)


@pytest.mark.long
def test_two_ranks_give_the_answers_of_one(run_ranks: RunRanks, every_model: dict[str, Any], folder: Path) -> None:
    """Each layout with some models; `long` has all."""
    cases = [f"{model} {TWO[number % len(TWO)]}".strip() for number, model in enumerate(MODELS)]
    assert_as_one_process(run_ranks, every_model, folder, 2, cases)


MANY = {2: TWO, 4: [*FOUR, "tensor=4", "sequence=4", "tensor=2"]}


@pytest.mark.long
@pytest.mark.parametrize("world_size", drawing.some("ranks of scoring", list(MANY), 1))
def test_all_layouts_give_the_answers_of_one_process(
    run_ranks: RunRanks, every_model: dict[str, Any], folder: Path, world_size: int
) -> None:
    """Each model with every third layout, each layout with every third model; `soak` has all."""
    pairs = itertools.product(enumerate(MODELS), enumerate(MANY[world_size]))
    cases = [f"{model} {layout}".strip() for (first, model), (second, layout) in pairs if (first + second) % 3 == 1]
    assert_as_one_process(run_ranks, every_model, folder, world_size, cases)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", MANY)
def test_any_layout_gives_the_answers_of_one_process(
    run_ranks: RunRanks, every_model: dict[str, Any], folder: Path, world_size: int
) -> None:
    cases = [f"{model} {layout}".strip() for model in MODELS for layout in MANY[world_size]]
    assert_as_one_process(run_ranks, every_model, folder, world_size, cases)
