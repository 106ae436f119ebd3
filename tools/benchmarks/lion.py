"""LION on CPUs: its chunked form at two lengths, beside the masked full matrix that the paper trains with."""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from benchmarks.operators import CLOCKS
from benchmarks.turns import BenchmarkReport, Ways, positive, time_in_turns
from lightscale.kernels.lion import lion, lion_vector

FORMS = ("lion-lit", "lion-retnet", "lion-s", "lion-s-vector")
GROWTH_LIMIT, LEAST_SPEEDUP = 1.5, 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shape of the operator, and what tells the time."""
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[4096, 32768],
        help="tokens of the row; the full matrix is computed at the smallest (default 4096 32768)",
    )
    parser.add_argument("--heads", type=positive, default=2, help="heads (default 2)")
    parser.add_argument("--width", type=positive, default=64, help="width of keys and values (default 64)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="as of mixers (default cpu)")


def full_matrix(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> Tensor:
    """SCALE(Q Kᵀ ⊙ M) V of one row, in memory and time that grow with the square of the length.

    Shapes and gates ("leave") are those of ``lion``.
    """
    scores = torch.einsum("bihk,bjhk->bhij", q, k)
    if log_decay is not None:
        through = log_decay.expand(q.shape[:3]).cumsum(1).transpose(1, 2)
        before = pad(through, (1, -1))
        # Of the two differences the one of the pair's direction is at most 0.
        left = before[..., :, None] - before[..., None, :]
        scores = scores * torch.minimum(left, through[..., None, :] - through[..., :, None]).exp()
    return torch.einsum("bhij,bjhv->bihv", scores / (scores.sum(-1, keepdim=True) + 1e-6), v)


def _works(variant: str, tokens: int, heads: int, width: int, calls: int) -> dict[str, Callable[[], object]]:
    """The chunked form and the full matrix, forward and backward, with features and gates as LION has them.

    The vector gate has a matrix for each channel: it is put beside the matrix of one gate, which has one.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, 1, tokens, heads, width, generator=generator)
    leaves = [x.requires_grad_() for x in (q.exp(), k.exp(), v)]
    log_decay = None
    if variant == "lion-retnet":
        log_decay = logsigmoid(torch.randn(heads, generator=generator)).requires_grad_()
    elif variant == "lion-s":
        log_decay = logsigmoid(torch.randn(1, tokens, heads, generator=generator)).requires_grad_()
    elif variant == "lion-s-vector":
        log_decay = logsigmoid(torch.randn(1, tokens, heads, width, generator=generator)).requires_grad_()
    learned = [*leaves, *([] if log_decay is None else [log_decay])]

    def work(form: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> None:
            for _ in range(calls):
                torch.autograd.grad(form(*leaves, log_decay), learned, do)

        return run

    if variant == "lion-s-vector":
        return {
            "chunked": work(lambda *x: lion_vector(*x, backend="chunked")),
            "full matrix": work(lambda q, k, v, log_decay: full_matrix(q, k, v, log_decay[..., 0])),
        }
    return {"chunked": work(lambda *x: lion(*x, backend="chunked")[0]), "full matrix": work(full_matrix)}


def run(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Time per token of LION's forms, how it grows, and how many times the full matrix' it is."""
    lengths = sorted(set(args.tokens))
    # About the same work in a sample of every length.
    calls = {n: lengths[-1] // n for n in lengths}
    ways: Ways = {}
    for variant in FORMS:
        ways[variant] = {str(n): _works(variant, n, args.heads, args.width, calls[n])["chunked"] for n in lengths} | {
            "full matrix": _works(variant, lengths[0], args.heads, args.width, 1)["full matrix"]
        }
    samples_s = time_in_turns(ways, args.repeats, clock=CLOCKS[args.clock])
    tokens = {str(n): calls[n] * n for n in lengths} | {"full matrix": lengths[0]}
    found = {
        name: _ratios({work: statistics.median(taken) / tokens[work] for work, taken in samples.items()}, lengths)
        for name, samples in samples_s.items()
    }
    options = {name: getattr(args, name) for name in ("heads", "width", "clock", "repeats")}
    yield BenchmarkReport(
        settings={"dtype": "float32", "rows": 1, "tokens": lengths} | options,
        figures={
            "targets": {"growth_limit": GROWTH_LIMIT, "speedup": LEAST_SPEEDUP},
            "forms": found,
            "samples_s": samples_s,
        },
        table=_table(found, lengths),
    )


def _ratios(s_per_token: dict[str, float], lengths: list[int]) -> dict[str, Any]:
    growth = s_per_token[str(lengths[-1])] / s_per_token[str(lengths[0])]
    speedup = s_per_token["full matrix"] / s_per_token[str(lengths[0])]
    reached = growth <= GROWTH_LIMIT and speedup >= LEAST_SPEEDUP
    return {"s_per_token": s_per_token, "growth": growth, "speedup": speedup, "reached": reached}


def _table(found: dict[str, dict[str, Any]], lengths: list[int]) -> Table:
    """One line for each form."""
    table = Table(
        title="forward + backward, µs per token",
        caption=f"growth: {lengths[-1]} tokens beside {lengths[0]}, at most {GROWTH_LIMIT:g}\n"
        f"speed-up: over the masked full matrix at {lengths[0]} tokens, at least {LEAST_SPEEDUP:g}",
    )
    table.add_column("form")
    for heading in ("full matrix", *map(str, lengths), "growth", "speed-up"):
        table.add_column(heading, justify="right")
    for name, ratios in found.items():
        times = [f"{ratios['s_per_token'][work] * 1e6:.1f}" for work in ("full matrix", *map(str, lengths))]
        mark = "" if ratios["reached"] else " [red]missed[/red]"
        table.add_row(name, *times, f"{ratios['growth']:.2f}", f"{ratios['speedup']:.1f}{mark}")
    return table
