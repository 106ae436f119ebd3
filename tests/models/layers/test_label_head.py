"""Labels of documents and of pairs from states on sequence ranks, with any cuts, beside whole rows by plain PyTorch."""

import itertools
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.model import HeadConfig, Pooling
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.label_head import LabelHead, label_losses
from lightscale.parallel.mesh import start_mesh

RunRanks = Callable[..., list[Any]]
RANKS, ROWS, TOKENS, WIDTH, LABELS, CASES = 3, 3, 24, 6, 4, 6
HEADS = [
    HeadConfig(num_labels=LABELS, pooling=pooling, pairs=pairs, bias=bias)
    for pooling in typing.get_args(Pooling)
    for pairs, bias in ((False, True), (True, False), (True, True))
]


def drawn_case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
    """States (b, n, d), positions, labels and what counts (b, n), and the edges of segments, some of them empty."""
    rng = np.random.default_rng(seed)
    positions, counted = np.zeros((ROWS, TOKENS), dtype=np.int64), np.zeros((ROWS, TOKENS))
    for row in range(ROWS):
        # An even number of documents, and padding behind them.
        starts = np.sort(rng.choice(np.arange(1, TOKENS), size=2 * int(rng.integers(1, 6)), replace=False))
        edges = [0, *starts.tolist(), TOKENS]
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            positions[row, start:stop] = np.arange(stop - start)
            counted[row, stop - 1] = number % 2
    edges = [0, *np.sort(rng.choice([0, TOKENS, *rng.integers(1, TOKENS, 4)], size=RANKS - 1)).tolist(), TOKENS]
    hidden = torch.from_numpy(rng.standard_normal((ROWS, TOKENS, WIDTH)))
    labels = torch.from_numpy(rng.integers(0, LABELS, (ROWS, TOKENS)))
    return hidden, torch.from_numpy(positions), labels, torch.from_numpy(counted), edges


def set_weights(head: LabelHead, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(head.named_parameters()):
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)


def on_ranks(rank: int, world_size: int, init_method: str) -> list[tuple[float, Tensor, dict[str, Tensor]]]:
    """Of each case the loss, and gradients of the states here and of the weights."""
    found = []
    with start_mesh(
        device="cpu", rank=rank, world_size=world_size, init_method=init_method, sequence=world_size
    ) as mesh:
        config: Any = type("Config", (), {"params_dtype": torch.float64})
        for number, (settings, seed) in enumerate(itertools.product(HEADS, range(CASES))):
            hidden, positions, labels, counted, edges = drawn_case(seed)
            here = slice(edges[rank], edges[rank + 1])
            lengths = np.diff(edges).tolist()
            head = LabelHead(config, settings, WIDTH, 0.02, mesh.groups.tp)
            set_weights(head, number)
            own = hidden[:, here].transpose(0, 1).contiguous().requires_grad_()
            context = SequenceContext.of(positions[:, here], exchange=mesh.exchange, lengths=lengths)
            logits, last = head(own, context)
            loss = label_losses(logits, last, labels[:, here], counted[:, here]).sum()
            loss.backward()
            gradients = {name: parameter.grad for name, parameter in head.named_parameters()}
            found.append((loss.item(), own.grad.transpose(0, 1), gradients))
    return found


def plainly(settings: HeadConfig, number: int, seed: int) -> tuple[float, Tensor, dict[str, Tensor]]:
    """By whole rows, document after document."""
    hidden, positions, labels, counted, _ = drawn_case(seed)
    hidden.requires_grad_()
    generator = torch.Generator().manual_seed(number)
    shapes: dict[str, tuple[int, ...]] = {"weight": (LABELS, WIDTH)}
    if settings.pairs:
        shapes["hidden_weight"] = (WIDTH, 4 * WIDTH)
    if settings.bias:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    weights = {
        name: torch.randn(shapes[name], dtype=torch.float64, generator=generator).requires_grad_()
        for name in sorted(shapes)
    }
    pool = {"mean": lambda x: x.mean(0), "first": lambda x: x[0], "last": lambda x: x[-1]}[settings.pooling]
    total: Any = torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        edges = [*(positions[row] == 0).nonzero().flatten().tolist(), TOKENS]
        vectors = [pool(hidden[row, start:stop]) for start, stop in itertools.pairwise(edges)]
        for index, stop in enumerate(edges[1:]):
            if not counted[row, stop - 1]:
                continue
            x = vectors[index]
            if settings.pairs:
                one, two = vectors[index - 1], vectors[index]
                inner = weights["hidden_weight"] @ torch.cat([one, two, one * two, one - two])
                inner = inner + weights["hidden_bias"] if settings.bias else inner
                x = 0.5 * inner * (1 + torch.erf(inner / 2**0.5))
            logits = weights["weight"] @ x
            logits = logits + weights["bias"] if settings.bias else logits
            total = total + F.cross_entropy(logits, labels[row, stop - 1])
    total.backward()
    assert hidden.grad is not None
    return total.item(), hidden.grad, {name: weight.grad for name, weight in weights.items()}  # type: ignore[misc]


def test_documents_and_pairs_over_any_cuts_are_those_of_whole_rows(run_ranks: RunRanks) -> None:
    results = run_ranks(on_ranks, RANKS)
    cuts = [drawn_case(seed)[-1] for seed in range(CASES)]
    assert any(start == stop for edges in cuts for start, stop in itertools.pairwise(edges)), "a rank without tokens"
    for number, (settings, seed) in enumerate(itertools.product(HEADS, range(CASES))):
        loss, of_states, of_weights = plainly(settings, number, seed)
        own = [result[number] for result in results]
        case = f"{settings}, cuts {cuts[seed]}"
        assert sum(one[0] for one in own) == pytest.approx(loss, rel=1e-12), case
        assert torch.allclose(torch.cat([one[1] for one in own], dim=1), of_states, rtol=1e-9, atol=1e-12), case
        for name, gradient in of_weights.items():
            assert torch.allclose(sum(one[2][name] for one in own), gradient, rtol=1e-9, atol=1e-12), f"{case}: {name}"
