"""The language model: what it has, what it may see, and that it can be fed in any parts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.parallel.initialization import draw_weights, named_parameters
from lightscale.parallel.mesh import start_mesh

RunRanks = Callable[..., list[Any]]
MODEL = ModelConfig(num_layers=3, hidden_size=32, num_heads=4, intermediate_size=48, vocab_size=64, init_std=0.1)
VOCAB_SIZE, TOKENS = 61, 70
# Layers, width, heads, GLU width; parameters outside the embedding in millions, as the scaling-law paper prints them.
PUBLISHED = {
    "70M": (6, 512, 4, 1536, 21.2),
    "160M": (12, 768, 6, 2048, 87.3),
    "410M": (25, 1024, 8, 2816, 327.7),
    "1B": (32, 1536, 12, 4096, 918.6),
    "3B": (35, 2560, 20, 6912, 2798.4),
    "7B": (32, 4096, 32, 11008, 6509.6),
}


@contextmanager
def built(init_method: str, dtype: torch.dtype = torch.float64) -> Iterator[LanguageModel]:
    with start_mesh(device="cpu", init_method=init_method) as mesh:
        network = LanguageModel(transformer_config(MODEL, mesh, dtype), MODEL, vocab_size=VOCAB_SIZE, mesh=mesh)
        draw_weights(network, seed=2, tensor_rank=0, tensor_size=1)
        yield network


def rows() -> tuple[Tensor, Tensor]:
    """Tokens and positions (2, TOKENS): documents start at 20 and 41 of the first row, and at 64 of the second."""
    tokens = torch.randint(0, VOCAB_SIZE, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    first = torch.cat([torch.arange(20), torch.arange(21), torch.arange(29)])
    second = torch.cat([torch.arange(64), torch.arange(6)])
    return tokens, torch.stack([first, second])


# ----- one process for all that needs a model ------------------------------------------------------------------------


def examine(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    torch.set_grad_enabled(False)
    with built(f"{init_method}-1") as network:
        found = {
            "seen by": seen_by(network),
            "parts": fed_in_parts(network),
            "a row of its own": alone(network),
            "tied": is_tied(network),
            "keys": sorted(network.state_dict()),
        }
    with built(f"{init_method}-2", torch.float32) as network:
        found["parts in fp32"] = fed_in_parts(network)
    found["counts"] = count(f"{init_method}-3")
    return found


def seen_by(network: LanguageModel) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For some tokens, the positions (row, position) whose logits change with it."""
    tokens, positions = rows()
    before = network(tokens, positions)
    found = {}
    for row, position in ((0, 0), (0, 19), (0, 20), (0, 30), (0, 69), (1, 40), (1, 64)):
        changed = tokens.clone()
        changed[row, position] = (changed[row, position] + 1) % VOCAB_SIZE
        after = network(changed, positions)
        found[row, position] = [tuple(index) for index in (before != after).any(dim=-1).nonzero().tolist()]
    return found


def fed_in_parts(network: LanguageModel) -> dict[str, float]:
    """The largest difference of the logits from those of one pass."""
    tokens, positions = rows()
    whole = network(tokens, positions)
    cuts = {
        "one part": [],
        "documents apart": [20, 41, 64],
        "anywhere": [1, 2, 33, 60, 69],
        "token by token": list(range(1, TOKENS)),
        "a prompt, then tokens": list(range(25, TOKENS)),
    }
    found = {}
    for name, inner in cuts.items():
        states: dict[str, dict[str, Tensor]] = {}
        edges = [0, *inner, TOKENS]
        parts = [network(tokens[:, a:b], positions[:, a:b], states=states) for a, b in pairwise(edges)]
        found[name] = float((torch.cat(parts, dim=1) - whole).abs().max())
        assert sorted(states) == ["layer-0", "layer-1", "layer-2"]
        assert {key: tuple(state["S"].shape) for key, state in states.items()} == {
            "layer-0": (2, 4, 16, 8),
            "layer-1": (2, 4, 8, 8),
            "layer-2": (2, 4, 8, 8),
        }
    return found


def alone(network: LanguageModel) -> float:
    """A document in the middle of a row is what it would be in a row of its own."""
    tokens, positions = rows()
    whole, own = network(tokens, positions)[0, 20:41], network(tokens[:1, 20:41], positions[:1, 20:41])[0]
    return float((whole - own).abs().max())


def is_tied(network: LanguageModel) -> bool:
    """Whether a changed row of the embedding changes its own logit everywhere, and no other where it is not read."""
    tokens, positions = rows()
    unused = next(token for token in range(VOCAB_SIZE) if token not in tokens)
    before = network(tokens, positions)
    network.embedding.word_embeddings.weight[unused] += 1
    changed = (network(tokens, positions) != before).all(dim=0).all(dim=0)
    return changed.nonzero().flatten().tolist() == [unused]


def count(init_method: str) -> dict[str, tuple[int, int, int]]:
    """Parameters of the published sizes: outside the embedding, in it, and angles. Nothing is allocated."""
    found = {}
    with start_mesh(device="cpu", init_method=init_method) as mesh:
        device: Any = torch.cuda
        device.current_device = lambda: torch.device("meta")
        for size, (layers, width, heads, glu, _) in PUBLISHED.items():
            model = ModelConfig(
                num_layers=layers, hidden_size=width, num_heads=heads, intermediate_size=glu, vocab_size=100_280
            )
            network = LanguageModel(
                transformer_config(model, mesh, torch.float32), model, vocab_size=100_277, mesh=mesh
            )
            sizes = {name: parameter.numel() for name, parameter in named_parameters(network)}
            assert all(parameter.is_meta for parameter in network.parameters())
            embedding = sizes["embedding.word_embeddings.weight"]
            angles = sum(number for name, number in sizes.items() if "theta" in name)
            found[size] = (sum(sizes.values()) - embedding - angles, embedding, angles)
    return found


@pytest.fixture(scope="module")
def examined(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(examine, 1)
    result: dict[str, Any] = found
    return result


def test_a_token_is_seen_from_its_place_to_the_end_of_its_document(examined: dict[str, Any]) -> None:
    ends = {0: [20, 41, TOKENS], 1: [64, TOKENS]}
    for (row, position), changed in examined["seen by"].items():
        end = next(end for end in ends[row] if position < end)
        assert changed == [(row, t) for t in range(position, end)], (row, position)


@pytest.mark.parametrize(("key", "limit"), [("parts", 1e-10), ("parts in fp32", 1e-4)])
def test_any_parts_give_the_logits_of_one_pass(examined: dict[str, Any], key: str, limit: float) -> None:
    assert len(examined[key]) == 5
    assert {name: value for name, value in examined[key].items() if value > limit} == {}


def test_a_document_does_not_see_its_row(examined: dict[str, Any]) -> None:
    assert examined["a row of its own"] <= 1e-12


def test_the_output_layer_is_the_embedding(examined: dict[str, Any]) -> None:
    assert examined["tied"]
    assert not [key for key in examined["keys"] if key.startswith("output_layer") and key.endswith("weight")]


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes(examined: dict[str, Any], size: str) -> None:
    layers, width, heads, glu, printed = PUBLISHED[size]
    rest, embedding, angles = examined["counts"][size]
    rank = width // heads
    assert rest == 4 * layers * width**2 + 2 * layers * width * rank + 3 * layers * width * glu
    assert (embedding, angles) == (100_280 * width, width)
    assert abs(rest / 1e6 - printed) <= max(0.0015 * printed, 0.06)
