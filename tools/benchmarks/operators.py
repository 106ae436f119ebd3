"""The operators of the mixers on CPUs: their chunked forms beside their recurrences and softmax attention."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

from benchmarks.turns import BenchmarkReport, Ways, compare, passes, positive, time_in_turns
from lightscale.kernels.delta_rule import delta_rule, delta_rule_reference
from lightscale.kernels.gla import gla, gla_reference
from lightscale.kernels.lightnet import Angles, lightnet_attention, lightnet_attention_reference
from lightscale.kernels.lightning import (
    DEFAULT_CHUNK_SIZE,
    lightning_attention,
    lightning_attention_reference,
)
from lightscale.kernels.tpe import tpe_scan, tpe_scan_reference

# What a linear mixer must reach on a CPU, forward and backward together.
LEAST_SPEEDUP = 4.0
GROWTH_AIM, GROWTH_LIMIT = 1.25, 1.5

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def lightning_arguments(parser: argparse.ArgumentParser) -> None:
    """The shape of the operator."""
    parser.add_argument("--tokens", type=positive, default=4096, help="tokens of the row (default 4096)")
    parser.add_argument("--heads", type=positive, default=8, help="heads (default 8)")
    parser.add_argument("--width", type=positive, default=64, help="width of keys and values (default 64)")
    parser.add_argument(
        "--chunk-size",
        type=positive,
        default=DEFAULT_CHUNK_SIZE,
        help=f"tokens of a chunk (default {DEFAULT_CHUNK_SIZE})",
    )


def run_lightning(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Lightning attention in chunks, by its recurrence under autograd, and causal softmax attention."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, args.tokens, args.heads, args.width)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    do = torch.randn(shape, generator=generator)
    log_decay = -(2.0 ** -torch.arange(1, args.heads + 1))
    # Softmax attention gets the layout that it is made for, (B, H, T, width).
    q_h, k_h, v_h = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
    do_h = do.transpose(1, 2).contiguous()
    ways: Ways = {
        "chunked": passes(
            lambda: lightning_attention(q, k, v, log_decay, chunk_size=args.chunk_size, backend="chunked")[0],
            (q, k, v),
            do,
        ),
        "naive": passes(lambda: lightning_attention_reference(q, k, v, log_decay)[0], (q, k, v), do),
        "sdpa": passes(lambda: scaled_dot_product_attention(q_h, k_h, v_h, is_causal=True), (q_h, k_h, v_h), do_h),
    }
    options = {name: getattr(args, name) for name in ("tokens", "heads", "width", "chunk_size")}
    settings = {"dtype": "float32", "rows": 1} | options
    yield compare(ways, subject="chunked", settings=settings, repeats=args.repeats)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The operator of a mixer, without projections."""

    inputs: Callable[[int], tuple[Tensor, ...]]
    """For a row of so many tokens; gradients are taken of those that require one."""
    fast: Callable[..., Tensor]
    """What training uses."""
    naive: Callable[..., Tensor] | None = None
    """The recurrence, one token at a time; None: there is none."""

    def forward_backward(self, form: Callable[..., Tensor], num_tokens: int, *, calls: int) -> Callable[[], object]:
        """``form`` on a row of ``num_tokens`` tokens with its backward, ``calls`` times."""
        inputs = self.inputs(num_tokens)
        leaves = tuple(x for x in inputs if x.requires_grad)
        with torch.no_grad():
            cotangent = torch.randn_like(form(*inputs))

        def work() -> None:
            for _ in range(calls):
                torch.autograd.grad(form(*inputs), leaves, cotangent)

        return work


class Inputs:
    """Random inputs of the operators, for one row."""

    def __init__(self, num_heads: int, width: int) -> None:
        self.num_heads, self.width = num_heads, width
        self._generator = torch.Generator().manual_seed(0)

    def _leaf(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).requires_grad_()

    def plain(self, num_tokens: int, *, key_width: int | None = None) -> tuple[Tensor, ...]:
        """q, k, v."""
        q, k = (self._leaf(1, num_tokens, self.num_heads, key_width or self.width) for _ in range(2))
        return q, k, self._leaf(1, num_tokens, self.num_heads, self.width)

    def doubled_keys(self, num_tokens: int) -> tuple[Tensor, ...]:
        """q, k, v as after LRPE."""
        return self.plain(num_tokens, key_width=2 * self.width)

    def fixed_decay(self, num_tokens: int) -> tuple[Tensor, ...]:
        """q, k, v and a decay per head."""
        return *self.plain(num_tokens), -(2.0 ** -torch.arange(1, self.num_heads + 1))

    def data_dependent_decay(self, num_tokens: int) -> tuple[Tensor, ...]:
        """q, k, v and a decay per token and channel, k what it leaves."""
        q, _, v = self.plain(num_tokens)
        log_decay = logsigmoid(torch.randn(q.shape, generator=self._generator))
        k = -torch.expm1(log_decay)
        return q, k.requires_grad_(), v, log_decay.requires_grad_()

    def delta(self, num_tokens: int, *, by_channel: bool) -> tuple[Tensor, ...]:
        """q and k of length 1, v, a decay per token and head or channel, and β."""
        q, k, v = self.plain(num_tokens)
        q, k = (normalize(x.detach(), dim=-1).requires_grad_() for x in (q, k))
        log_decay, beta = (logsigmoid(torch.randn(q.shape, generator=self._generator) + 3) for _ in range(2))
        beta = beta[..., 0].exp()
        return q, k, v, (log_decay if by_channel else log_decay[..., 0]).requires_grad_(), beta.requires_grad_()

    def angles(self, num_tokens: int) -> tuple[Tensor, ...]:
        """q, k, v, and theta and positions of LRPE."""
        theta = torch.logspace(0, -4, self.num_heads * self.width).view(self.num_heads, self.width)
        return *self.plain(num_tokens), theta, torch.arange(num_tokens)[None]

    def stream(self, num_tokens: int) -> tuple[Tensor, ...]:
        """x, decays with time scales from 1 to 4096 tokens, and γ."""
        channels = self.num_heads * self.width
        log_decay = -torch.logspace(0, -12, self.width, base=2)
        return self._leaf(1, num_tokens, channels), log_decay.requires_grad_(), self._leaf(channels, self.width)

    def heads_first(self, num_tokens: int) -> tuple[Tensor, ...]:
        """q, k, v in the layout that softmax attention is made for, (B, H, T, width)."""
        q, k, v = (self._leaf(1, self.num_heads, num_tokens, self.width) for _ in range(3))
        return q, k, v


def operators(num_heads: int, width: int) -> dict[str, Operator]:
    """By mixer. ``tpe`` is no mixer, but a scan over all channels, once in a model."""
    inputs = Inputs(num_heads, width)
    return {
        "tnl": Operator(
            inputs=inputs.fixed_decay,
            fast=lambda *x: lightning_attention(*x, backend="chunked")[0],
            naive=lambda *x: lightning_attention_reference(*x)[0],
        ),
        "cosformer2": Operator(
            inputs=inputs.doubled_keys,
            fast=lambda *x: lightning_attention(*x, backend="chunked")[0],
            naive=lambda q, k, v: lightning_attention_reference(q, k, v, None)[0],
        ),
        "hgrn2": Operator(
            inputs=inputs.data_dependent_decay,
            fast=lambda *x: gla(*x, backend="chunked")[0],
            naive=lambda *x: gla_reference(*x)[0],
        ),
        "lightnet": Operator(
            inputs=inputs.angles,
            fast=lambda q, k, v, *angles: lightnet_attention(q, k, v, angles=Angles(*angles), backend="chunked")[0],
            naive=lambda q, k, v, *angles: lightnet_attention_reference(q, k, v, angles=Angles(*angles))[0],
        ),
        **{
            mixer: Operator(
                inputs=partial(inputs.delta, by_channel=by_channel),
                fast=lambda *x: delta_rule(*x, backend="chunked")[0],
                naive=lambda *x: delta_rule_reference(*x)[0],
            )
            for mixer, by_channel in (("gated-delta-net", False), ("kimi-delta", True))
        },
        "tpe": Operator(
            inputs=inputs.stream,
            fast=lambda *x: tpe_scan(*x, backend="chunked")[0],
            naive=lambda *x: tpe_scan_reference(*x)[0],
        ),
        "llama": Operator(
            inputs=inputs.heads_first,
            fast=lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
    }


def mixers_arguments(parser: argparse.ArgumentParser) -> None:
    """The shape of the operators, and what tells the time."""
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[2048, 8192, 32768],
        help="tokens of the row; the recurrence runs at the smallest (default 2048 8192 32768)",
    )
    parser.add_argument("--heads", type=positive, default=4, help="heads (default 4)")
    parser.add_argument("--width", type=positive, default=64, help="width of a head (default 64)")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="cpu",
        help="cpu: CPU seconds of this process, nearly independent of other load (default cpu)",
    )


def run_mixers(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Every mixer's operator at several lengths, and its recurrence at the smallest; softmax attention beside them."""
    lengths = sorted(set(args.tokens))
    # About the same work in a sample of every length.
    calls = {n: lengths[-1] // n for n in lengths}
    ways: Ways = {}
    for name, operator in operators(args.heads, args.width).items():
        ways[name] = {str(n): operator.forward_backward(operator.fast, n, calls=calls[n]) for n in lengths}
        if operator.naive is not None:
            ways[name]["naive"] = operator.forward_backward(operator.naive, lengths[0], calls=1)
    samples_s = time_in_turns(ways, args.repeats, clock=CLOCKS[args.clock])
    tokens = {str(n): calls[n] * n for n in lengths} | {"naive": lengths[0]}
    mixers = {
        name: scaling({work: statistics.median(taken) / tokens[work] for work, taken in samples.items()}, lengths)
        for name, samples in samples_s.items()
    }
    options = {name: getattr(args, name) for name in ("heads", "width", "clock", "repeats")}
    yield BenchmarkReport(
        settings={"dtype": "float32", "rows": 1, "tokens": lengths} | options,
        figures={
            "targets": {"speedup": LEAST_SPEEDUP, "growth_aim": GROWTH_AIM, "growth_limit": GROWTH_LIMIT},
            "mixers": mixers,
            "samples_s": samples_s,
        },
        table=mixers_table(mixers, lengths),
    )


def scaling(s_per_token: dict[str, float], lengths: list[int]) -> dict[str, Any]:
    """How a mixer's time per token grows with the length, and how many times its recurrence's it is."""
    found: dict[str, Any] = {"s_per_token": s_per_token}
    found["growth"] = s_per_token[str(lengths[-1])] / s_per_token[str(lengths[0])]
    if "naive" in s_per_token:
        found["speedup"] = s_per_token["naive"] / s_per_token[str(lengths[0])]
        found["reached"] = found["speedup"] >= LEAST_SPEEDUP and found["growth"] <= GROWTH_LIMIT
    return found


def mixers_table(mixers: dict[str, dict[str, Any]], lengths: list[int]) -> Table:
    """One line for each mixer."""
    table = Table(
        title="forward + backward, µs per token",
        caption=f"speed-up: of the fast form over the recurrence at {lengths[0]} tokens, at least {LEAST_SPEEDUP:g}\n"
        f"growth: {lengths[-1]} tokens beside {lengths[0]}, aim {GROWTH_AIM}, limit {GROWTH_LIMIT}",
    )
    table.add_column("mixer")
    for heading in ("naive", *map(str, lengths), "speed-up", "growth"):
        table.add_column(heading, justify="right")
    for name, found in mixers.items():
        seconds = found["s_per_token"]
        times = [f"{seconds[work] * 1e6:.1f}" if work in seconds else "" for work in ("naive", *map(str, lengths))]
        speedup = f"{found['speedup']:.1f}" if "speedup" in found else ""
        mark = "" if found.get("reached", True) else " [red]missed[/red]"
        table.add_row(name, *times, speedup, f"{found['growth']:.2f}{mark}")
    return table
