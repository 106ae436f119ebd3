"""Texts are those of each prompt by itself: in any batch, on tensor ranks, with every mixer; held to whole passes."""

import itertools
import math
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightscale.evaluation.inference.documents import Documents
from lightscale.evaluation.inference.generate import TextGenerator, in_order
from lightscale.evaluation.inference.prompts import Prompt, Sampling
from lightscale.evaluation.inference.requests import GenerateUntil, Generation, Request
from lightscale.evaluation.inference.sampling import Chooser, chosen_tokens
from lightscale.evaluation.inference.scoring import Scorer, ScoringSettings

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))
parity = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "parity.py")))
# A machine that others use too is slow at times.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
RunRanks = Callable[..., list[Any]]
MODELS = parity.WRITING
FP32 = ["hgrn2", "llama"]
BATCHES = (1, 3, 32)


@dataclass
class Letters:
    """A tokenizer whose tokens are a character each, in place of one made from text."""

    eot_id: int = 7

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)


def prompts() -> list[Prompt]:
    """Of lengths from one token to several passes, each written in another way."""
    generator = np.random.default_rng(0)
    ways = [
        Sampling(temperature=0),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0, repetition_penalty=1.3),
        Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=2),
        Sampling(temperature=0.7, top_p=0.8, repetition_penalty=0.8, seed=3),
        Sampling(temperature=0),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=-5),
    ]
    lengths, most = [1, 40, 3, 41, 17, 120, 2, 39], [8, 5, 10, 7, 1, 6, 12, 3]
    alone = [
        Prompt(ids=[7, *generator.integers(0, parity.VOCAB_SIZE, length - 1).tolist()], max_tokens=tokens, sampling=way)
        for length, tokens, way in zip(lengths, most, ways, strict=True)
    ]
    examples, *questions = (generator.integers(0, parity.VOCAB_SIZE, length).tolist() for length in (34, 20, 3, 9, 9))
    few_shot = [
        Prompt(ids=[7, *examples, *behind], max_tokens=tokens, sampling=way)
        for behind, tokens, way in zip(
            # One question, asked in two ways; two of one length; one twice, and the examples alone.
            ([*questions[0], 1, 2], [*questions[0], 3], questions[1], questions[2], questions[3], questions[3], []),
            [5, 3, 6, 4, 7, 2, 5],
            ways,
            strict=False,
        )
    ]
    # Those that begin alike stand apart.
    return [*few_shot[:3], *alone, *few_shot[3:]]


SHARED = 16


def plain_choice(logits: list[float], seen: Sequence[int], how: Sampling, draw: float) -> int:
    """The next token, one number at a time."""
    scores = dict(enumerate(logits))
    for token in set(seen):
        scores[token] *= how.repetition_penalty if scores[token] < 0 else 1 / how.repetition_penalty
    if how.temperature == 0:
        return max(scores, key=lambda token: scores[token])
    highest = max(scores.values())
    weights = {token: math.exp((score - highest) / how.temperature) for token, score in scores.items()}
    if how.top_k is not None or how.top_p is not None:
        order = sorted(weights, key=lambda token: -weights[token])[: how.top_k]
        total, before, kept = sum(weights[token] for token in order), 0.0, []
        for token in order:
            if kept and before >= (how.top_p or 1.0) * total:
                break
            kept.append(token)
            before += weights[token]
        weights = {token: weights[token] for token in kept}
    target = draw * sum(weights.values())
    for token, weight in weights.items():
        target -= weight
        if target < 0:
            return token
    return token


@torch.no_grad()
def plainly(model: Any, prompt: Prompt) -> list[int]:
    """What is written behind ``prompt`` by passes over the whole document, without a state."""
    random = np.random.default_rng(prompt.sampling.seed % 2**64)
    ids, found = list(prompt.ids), list[int]()
    while len(found) < prompt.max_tokens:
        logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1, : parity.VOCAB_SIZE]
        token = plain_choice(logits.tolist(), ids, prompt.sampling, random.random())
        if token == Letters.eot_id:
            break
        ids.append(token)
        found.append(token)
    return found


STOPS = tuple(Letters().decode([token]) for token in range(10, 30))


def requests() -> list[Request]:
    """As a task asks them."""
    return [
        GenerateUntil(context=np.array(prompt.ids, dtype=np.int32), max_tokens=prompt.max_tokens, until=STOPS)
        for prompt in prompts()
    ]


def write(
    rank: int, world_size: int, init_method: str, folder: Path, cases: list[tuple[str, torch.dtype]]
) -> dict[str, Any]:
    """Tokens of each case: in batches, and on one process by whole passes; answers of a scorer."""
    found: dict[str, Any] = {}
    for number, (text, dtype) in enumerate(cases):
        case = parity.Case.of(text)
        own: dict[str, Any] = {}
        found[f"{text} {dtype}"] = own
        with parity.engine_on(case, rank, world_size, f"{init_method}-{number}", dtype) as engine:
            # What one process makes, all layouts take.
            path = folder / f"{case.model}-{dtype}.pt"
            if world_size == 1:
                # Wide, or each token would only be followed by itself: layers count for more than the embedding.
                weights = {
                    name: 10 * weight if weight.dim() == 2 and name.endswith(".weight") else weight
                    for name, weight in parity.disturbed(engine).items()
                }
                torch.save(weights, path)
            parity.set_weights(engine, torch.load(path))
            model = engine.module.eval()
            if case.pipeline * case.sequence == 1:
                for batch in OF_MODEL.get(text, BATCHES) if world_size == 1 else (3,):
                    generator = TextGenerator(model, Letters(), batch=batch)  # type: ignore[arg-type]
                    own[f"{batch}"] = [(one.ids, one.ended) for one in in_order(generator, prompts())]
                    sharing = TextGenerator(model, Letters(), batch=batch, least_shared=SHARED)  # type: ignore[arg-type]
                    own[f"{batch}, shared"] = [(one.ids, one.ended) for one in in_order(sharing, prompts())]
                    own[f"{batch}, tokens"] = (generator.run_tokens, sharing.run_tokens)
                scorer = Scorer(model, engine.mesh, tokenizer=Letters(), settings=ScoringSettings(row_tokens=64))  # type: ignore[arg-type]
                own["answers"] = scorer.answer(requests()[::-1])[::-1]
                own["work"] = (scorer.work.run_tokens, scorer.work.asked_tokens)
            if world_size == 1:
                own["plainly"] = [plainly(model, prompt) for prompt in prompts()]
                greedy = Sampling(temperature=0)
                own["greedy"] = [
                    text if prompt.sampling == greedy else plainly(model, replace(prompt, sampling=greedy))
                    for prompt, text in zip(prompts(), own["plainly"], strict=True)
                ]
            else:
                # Within the layers tensor ranks share tokens again.
                own["shares"] = model.config.sequence_parallel
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


CASES = [*((model, torch.float64) for model in MODELS), *((model, torch.float32) for model in ("hgrn2", "llama"))]
NAMES = [f"{model} {dtype}" for model, dtype in CASES]
# All sizes of batches with the model that grows, and with one whose state is constant; with each of the others one size
# beside that of the two ranks.
OF_MODEL = {model: tuple({3, batch}) for model, batch in drawing.covering("batches", MODELS, BATCHES, strength=1)}
OF_MODEL |= dict.fromkeys(FP32, BATCHES)


def write_and_grow(rank: int, world_size: int, init_method: str, folder: Path) -> dict[str, Any]:
    return {"growing": grow(f"{init_method}-growing"), **write(rank, world_size, init_method, folder, CASES)}


@pytest.fixture(scope="module")
def found(run_ranks: RunRanks, folder: Path) -> dict[str, Any]:
    (found,) = run_ranks(write_and_grow, 1, folder, timeout_s=500)
    return dict(found)


@pytest.mark.parametrize("name", NAMES)
def test_in_batches_every_text_is_that_of_whole_passes(found: dict[str, Any], name: str) -> None:
    plain = found[name]["plainly"]
    # Not all alike, and not one token again and again, or little would be seen.
    assert len({tuple(ids[:3]) for ids in plain}) >= 5
    assert sum(len(set(ids)) for ids in plain) > sum(map(len, plain)) / 2
    for batch in OF_MODEL[name.split()[0]]:
        assert [ids for ids, _ in found[name][f"{batch}"]] == plain, batch
        for (ids, ended), prompt in zip(found[name][f"{batch}"], prompts(), strict=True):
            assert ended == ("tokens" if len(ids) == prompt.max_tokens else "end_of_text")


@pytest.mark.parametrize(("name", "batch"), [(name, batch) for name in NAMES for batch in OF_MODEL[name.split()[0]]])
def test_prefixes_that_prompts_share_are_run_once(found: dict[str, Any], name: str, batch: int) -> None:
    own = found[name]
    assert own[f"{batch}, shared"] == own[f"{batch}"]
    # Seven prompts have 34 tokens in common, as the last token of one of them is to be followed; two of them 21 more,
    # and two others 9, which are too few.
    apart, shared = own[f"{batch}, tokens"]
    if batch == 1:
        # The last of as many tokens as were asked for is not fed.
        fed = sum(len(prompt.ids) for prompt in prompts())
        written = sum(len(ids) - (ended == "tokens") for ids, ended in own["1"])
        assert apart == fed + written
        assert shared == apart - 6 * 34 - 21
    assert shared <= apart - 6 * 34


def test_requests_share_prefixes(found: dict[str, Any]) -> None:
    for name in NAMES:
        run_tokens, asked_tokens = found[name]["work"]
        assert run_tokens < 0.8 * asked_tokens, name


def answers_of(greedy: list[list[int]]) -> list[Generation]:
    """What a scorer must answer, from whole texts."""
    texts = [Letters().decode(ids) for ids in greedy]
    ends = [min((text.index(stop) for stop in STOPS if stop in text), default=len(text)) for text in texts]
    # Some stop, some do not.
    assert 0 < sum(end < len(text) for text, end in zip(texts, ends, strict=True)) < len(texts)
    return [
        Generation(text=text[:end], num_tokens=min(end + 1, len(text))) for text, end in zip(texts, ends, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_answers_to_generate_until(found: dict[str, Any], name: str) -> None:
    assert found[name]["answers"] == answers_of(found[name]["greedy"])


# Of tensor ranks, and of generation, every mixer is tested by itself.
TWO = [*(f"{model} tensor=2" for model in drawing.some("tensor ranks", MODELS, 4)), "hgrn2"]


def test_two_ranks_write_what_one_writes(run_ranks: RunRanks, found: dict[str, Any], folder: Path) -> None:
    """Tensor ranks hold a model together; data ranks share requests."""
    cases = [(text, torch.float64) for text in TWO]
    for of_rank in run_ranks(write, 2, folder, cases, timeout_s=500):
        for text in TWO:
            model, _, layout = text.partition(" ")
            own, one = of_rank[f"{text} {torch.float64}"], found[f"{model} {torch.float64}"]
            assert own["3"] == own["3, shared"] == one["3"], text
            assert own["answers"] == one["answers"], text
            assert own["shares"] == bool(layout)


def grow(init_method: str) -> dict[str, Any]:
    """Where LLaMA's cache lies while documents grow, and how large it is; with and without knowing how many come."""
    found: dict[str, Any] = {}
    with parity.engine_on(parity.Case.of("llama"), 0, 1, init_method, torch.float64) as engine:
        for name, room in (("known", 90), ("unknown", 8)):
            documents = Documents(engine.module.eval())
            documents.begin([[7, 1, 2], [7]], room=room)
            places, sizes = [], []
            for _ in range(90):
                documents.feed([[3], [4]])
                state = documents.states["layer-0"]
                places.append(state["k"].data_ptr())
                sizes.append(documents.state_bytes)
            found[name] = (places, sizes)
        # Neither a document that is gone nor one that has come changes the others.
        alone = Documents(engine.module)
        alone.begin([[7]])
        expected = [alone.feed([[4]])[0] for _ in range(91)][-1]
        documents.keep([1])
        documents.begin([[9] * 500])
        found["after"] = float((documents.feed([[4], [5]])[0] - expected).abs().max())
    return found


def test_the_cache_of_llama_is_not_copied_for_each_token(found: dict[str, Any]) -> None:
    model = parity.MODELS["llama"]
    lengths = model.num_layers * 2 * 8
    of_column = model.num_layers * 2 * 2 * model.hidden_size * 8  # keys and values of two rows in fp64
    places, sizes = found["growing"]["known"]
    assert len(set(places)) == 1
    assert set(sizes) == {93 * of_column + lengths}
    places, sizes = found["growing"]["unknown"]
    # 11, 22, 44, 88 and 176 columns.
    assert sum(one != other for one, other in itertools.pairwise(places)) == 4
    assert sizes[-1] == 176 * of_column + lengths
    assert found["growing"]["after"] < 1e-10


def test_possible_tokens_are_those_of_transformers() -> None:
    """Penalty, temperature, top_k and top_p give the probabilities that transformers' own classes give."""
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 40, generator=generator, dtype=torch.float64)
    seen = torch.tensor([[3, 3, 8, 21]])
    how = Sampling(temperature=0.9, top_k=12, top_p=0.85, repetition_penalty=1.7)
    processors = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(how.repetition_penalty),
            transformers.TemperatureLogitsWarper(how.temperature),
            transformers.TopKLogitsWarper(how.top_k),
            transformers.TopPLogitsWarper(how.top_p),
        ]
    )
    expected = processors(seen, logits).softmax(dim=-1)[0]
    assert 3 < int((expected > 0).sum()) < 12
    num_draws = 20_000
    draws = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    penalized = Chooser(how, seen[0].tolist()).penalized(logits[0])
    drawn = chosen_tokens(penalized.expand(num_draws, -1), how, draws)
    found = torch.bincount(drawn, minlength=40).double() / num_draws
    assert torch.equal(found > 0, expected > 0)
    assert float((found - expected).abs().max()) < 2 / num_draws
