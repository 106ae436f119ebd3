"""One scan of a whole document beside two, as in Figure 2 of LightNet (arXiv 2405.21022): ``bench.py scans``.

    one scan    S = Σ_i softmax_i(k)_i v_iᵀ, o_t = Sᵀ q_t                       (equation 8)
    two scans   o_t = causal(q, k, v)_t + the same from the other end, decayed  (section 3.1; itself it reads twice)

All ways take turns at every length, in one run. Two scans are two calls of lightning attention, as in the paper, with
what it takes to turn the row around; LION's operator does both directions in one pass over its chunks. Plain forms are
PyTorch alone, under autograd.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.gpu_kernels import GPU_SETTING, Timer
from benchmarks.operators import CLOCKS
from benchmarks.turns import BenchmarkReport, positive
from cuda_twin.installation import NOTE, in_twin
from lightscale.kernels.lightnet import lightnet_noncausal
from lightscale.kernels.lightning import lightning_attention
from lightscale.kernels.lion import lion

ONE, TWO, FUSED = "one scan", "two scans", "two directions, one pass (LION)"
PLAIN_ONE, PLAIN_TWO = "one scan, plain PyTorch", "two scans, plain PyTorch"
PLAIN_PRODUCT = "one scan without decay, plain PyTorch"
PASSES = ("forward", "backward")
LEAST_RATIO = 2.0
"""How many times longer than one scan two are to take at the longest row: the paper says several times."""
_LENGTHS = [2**exponent for exponent in range(10, 17)]
JUDGED_TOKENS = 2**14
"""From this length on: at short rows launches take longer than the work."""
_CPU_SETTING: dict[str, Any] = {"dtype": torch.float32, "num_heads": 2, "width": 64}
_CHUNK = 64
_NO_GPU = "no GPU: these lines time the CPU forms"
_COLORS = {ONE: "tab:blue", TWO: "tab:red", FUSED: "tab:orange"}
_COLORS |= {PLAIN_ONE: _COLORS[ONE], PLAIN_TWO: _COLORS[TWO], PLAIN_PRODUCT: "tab:gray"}

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _two_scans(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    forward = lightning_attention(q, k, v, log_decay)[0]
    return forward + lightning_attention(q.flip(1), k.flip(1), v.flip(1), log_decay)[0].flip(1)


def _plain_causal(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Causal linear attention with a decay per head, chunk by chunk. Shapes are those of ``lightning_attention``."""
    num_tokens = q.shape[1]
    c = min(_CHUNK, num_tokens)
    # (B, H, T / c, c, K): unbound once, where an index for each chunk would make autograd quadratic.
    chunked = [pad(x.transpose(1, 2), (0, 0, 0, -num_tokens % c)).unflatten(2, (-1, c)) for x in (q, k, v)]
    steps = torch.arange(c, device=q.device)
    log = log_decay[:, None]
    inside = (log[..., None] * (steps[:, None] - steps)).exp().tril().to(q.dtype)
    read, write = ((log * exponent).exp()[..., None].to(q.dtype) for exponent in (steps + 1, c - 1 - steps))
    passed = (log_decay * c).exp()[:, None, None].to(q.dtype)
    state = q.new_zeros(q.shape[0], q.shape[2], k.shape[3], v.shape[3])
    outputs = []
    for q_c, k_c, v_c in zip(*(x.unbind(2) for x in chunked), strict=True):
        outputs.append((q_c @ k_c.mT * inside) @ v_c + (q_c * read) @ state)
        state = passed * state + (k_c * write).mT @ v_c
    return torch.cat(outputs, dim=2)[:, :, :num_tokens].transpose(1, 2)


def _plain_two(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    backward = _plain_causal(q.flip(1), k.flip(1), v.flip(1), log_decay).flip(1)
    return _plain_causal(q, k, v, log_decay) + backward


def _product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (q @ (k.mT @ v)).transpose(1, 2)


WAYS: dict[str, Form] = {
    ONE: lambda q, k, v, _: lightnet_noncausal(q, k, v),
    TWO: _two_scans,
    FUSED: lambda q, k, v, log_decay: lion(q, k, v, log_decay, normalize=False)[0],
    PLAIN_ONE: lambda q, k, v, _: _product(q, k.softmax(dim=1), v),
    PLAIN_TWO: _plain_two,
    PLAIN_PRODUCT: lambda q, k, v, _: _product(q, k, v),
}
"""q, k (B, T, H, K), v (B, T, H, V), log_decay (H,) -> (B, T, H, V)."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    device: torch.device
    dtype: torch.dtype
    num_heads: int
    width: int

    def inputs(self, tokens: int) -> tuple[list[Tensor], Tensor]:
        """q, k and v (1, tokens, heads, width), which take gradients; and the decays (heads,), which do not."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (3, 1, tokens, self.num_heads, self.width)
        drawn = torch.randn(shape, dtype=self.dtype, device=self.device, generator=generator)
        # From a reach of two tokens to one of 2^H, as ALiBi's slopes.
        log_decay = -(2.0 ** -torch.arange(1, self.num_heads + 1, device=self.device))
        return [x.clone().requires_grad_() for x in drawn], log_decay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Lengths and shape; the device decides what is not said."""
    add = parser.add_argument
    add("--tokens", type=positive, nargs="+", default=_LENGTHS, help="lengths of the row (default 1K, 2K … 64K)")
    for name, what, key in (("heads", "heads", "num_heads"), ("width", "width of keys and values", "width")):
        add(f"--{name}", type=positive, help=f"{what} (default {_CPU_SETTING[key]}, on a GPU {GPU_SETTING[key]})")
    add("--clock", choices=CLOCKS, default="cpu", help="on a CPU, as of mixers (default cpu)")


def run(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Every length in turn, the shortest first; the report so far after each."""
    on_gpu = torch.cuda.is_available()
    chosen = (GPU_SETTING if on_gpu else _CPU_SETTING) | {
        key: value for key, value in (("num_heads", args.heads), ("width", args.width)) if value is not None
    }
    sizes = _Sizes(device=torch.device("cuda" if on_gpu else "cpu"), **chosen)
    measure = Timer(sizes.device).ms if on_gpu else _clocked(CLOCKS[args.clock])
    lengths = sorted(set(args.tokens))
    settings = {
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "rows": 1,
        "tokens": lengths,
        "heads": sizes.num_heads,
        "width": sizes.width,
        "clock": "cuda" if on_gpu else args.clock,
        "repeats": args.repeats,
    }
    lines: list[dict[str, Any]] = []
    for tokens in lengths:
        lines += _in_turns(sizes, tokens, args.repeats, measure)
        figures = _figures(lines, settings, device=torch.cuda.get_device_name() if on_gpu else "cpu")
        yield BenchmarkReport(settings=settings, figures=figures, table=table(figures))


def _clocked(clock: Callable[[], float]) -> Callable[[Callable[[], object]], float]:
    def ms(work: Callable[[], object]) -> float:
        began = clock()
        work()
        return (clock() - began) * 1e3

    return ms


def _in_turns(
    sizes: _Sizes, tokens: int, repeats: int, measure: Callable[[Callable[[], object]], float]
) -> list[dict[str, Any]]:
    """Both passes of every way at one length, ``repeats`` rounds behind one that does not count."""
    leaves, log_decay = sizes.inputs(tokens)
    do = torch.randn_like(leaves[2])
    samples: dict[str, dict[str, list[float]]] = {way: {name: [] for name in PASSES} for way in WAYS}
    for number in range(repeats + 1):
        for way, form in WAYS.items():
            made: list[Tensor] = []
            # With what autograd keeps, as in training.
            took_ms = [measure(lambda form=form, made=made: made.append(form(*leaves, log_decay)))]  # type: ignore[misc]
            took_ms.append(measure(lambda made=made: torch.autograd.grad(made.pop(), leaves, do)))  # type: ignore[misc]
            if number:
                for name, ms in zip(PASSES, took_ms, strict=True):
                    samples[way][name].append(ms)
    medians = {way: {name: statistics.median(taken) for name, taken in found.items()} for way, found in samples.items()}
    for way, by_pass in medians.items():
        shown = ", ".join(f"{name} {ms:.2f} ms" for name, ms in by_pass.items())
        print(f"{way}, {tokens}: {shown}", file=sys.stderr, flush=True)
    return [
        {
            "way": way,
            "passes": name,
            "tokens": tokens,
            "ms": ms,
            "times_one_scan": ms / medians[ONE][name],
            "samples_ms": samples[way][name],
        }
        for way, by_pass in medians.items()
        for name, ms in by_pass.items()
    ]


def _figures(lines: list[dict[str, Any]], settings: dict[str, Any], *, device: str) -> dict[str, Any]:
    longest = max(line["tokens"] for line in lines)
    judged = longest >= JUDGED_TOKENS
    missed = [
        f"two scans, {line['passes']}, {longest}: {line['times_one_scan']:.2f} times one scan, at least {LEAST_RATIO:g}"
        for line in lines
        if judged and line["way"] == TWO and line["tokens"] == longest and line["times_one_scan"] < LEAST_RATIO
    ]
    notes = [NOTE] * in_twin() if device != "cpu" else [_NO_GPU]
    return {
        "device": device,
        "note": " ".join(notes) or None,
        "targets": {"two_scans_times_one": LEAST_RATIO, "at_tokens": longest} if judged else None,
        "lines": lines.copy(),
        "verdict": {"missed": missed},
    }


def table(figures: dict[str, Any]) -> Table:
    """A line for each length and pass: milliseconds, and how many times one scan's they are."""
    made = Table(title="ms (times one scan)", caption="\n".join([*figures["verdict"]["missed"], figures["note"] or ""]))
    made.add_column("pass")
    for heading in ("tokens", *WAYS):
        made.add_column(heading, justify="right")
    for name in PASSES:
        for tokens in dict.fromkeys(line["tokens"] for line in figures["lines"]):
            of_row = [line for line in figures["lines"] if (line["passes"], line["tokens"]) == (name, tokens)]
            cells = [f"{line['ms']:.2f} ({line['times_one_scan']:.1f})" for line in of_row]
            made.add_row(name, str(tokens), *cells)
    return made


def draw(figures: dict[str, Any], path: Path) -> None:
    """Milliseconds over tokens, forward and backward side by side, both axes logarithmic."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9.5, 5), layout="constrained")
    row = figure.subplots(1, len(PASSES), sharey=True)
    lengths = sorted({line["tokens"] for line in figures["lines"]})
    for axes, name in zip(row, PASSES, strict=True):
        for way, color in _COLORS.items():
            times = {x["tokens"]: x["ms"] for x in figures["lines"] if (x["way"], x["passes"]) == (way, name)}
            style = "--" if "plain" in way else "-"
            axes.plot([*times], [*times.values()], style, marker="o", markersize=3.5, color=color, label=way)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
        axes.set_xlabel("tokens")
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3, which="both")
    row[0].set_ylabel("ms")
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    settings, host = figures["settings"], figures["machine"]
    where = figures["device"] if figures["device"] != "cpu" else f"{host['cpu']}, {host['threads']} thread"
    figure.suptitle(
        f"One scan and two: {where}, {settings['dtype']}, {settings['heads']} heads of width {settings['width']}, "
        f"{host['date']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
