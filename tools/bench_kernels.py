#!/usr/bin/env python
"""The operators' kernels beside others' and beside the memory's speed: ``python tools/bench_kernels.py [--json]``.

On a GPU: ours, fla-core's nearest kernel (when that package is installed) and PyTorch's flash attention, forward and
forward + backward, in bf16, in one process. The floor of a line is the time that its bytes take at the copy bandwidth,
or its FLOPs at the matrix rate, both measured first. Without a GPU it says so, and times small shapes of the forms
that CPUs use, which shows that the tool works and nothing about GPUs.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import import_module
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lightscale.kernels.lightning import backend_of, lightning_attention

LENGTHS = (8192, 32768, 131072, 1048576)
HEADS, WIDTH = 16, 128
PASSES = ("forward", "forward + backward")

NO_GPU = (
    "no GPU here: these lines time small shapes of the forms that CPUs use. "
    "Figures of the kernels need a GPU: run the same command on one."
)
# A call that took longer than this in its first run is not repeated.
SLOW_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes to and from memory and FLOPs of a pass, per token and head."""

    bytes: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An operator of ours and what it is compared with, on rows of q, k (1, n, HEADS, key_width) and v."""

    name: str
    key_width: int
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]
    """Ours first."""
    costs: dict[str, Cost]
    """Of ours, by pass."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measurement."""

    operator: str
    passes: str
    tokens: int
    way: str
    ms: float
    ns_per_token_head: float
    floor_ns: float | None
    """None where no bandwidth was measured, and for the others' ways, whose traffic is not ours to count."""
    times_floor: float | None


def lightning_costs(K: int, V: int, *, chunk: int = 128, block: int = 64, stored_bytes: int = 2) -> dict[str, Cost]:
    """What lightning/README.md counts, in half precision: each pass over memory is written out there."""
    state = stored_bytes * K * V / chunk
    # Partners per token: whole blocks up to its own.
    partners = (chunk + block) / 2
    scan = Cost(bytes=2 * (K + V) + state, flops=2 * K * V)

    def products(X: int, Z: int) -> Cost:
        tiles = -(-Z // 64)
        return Cost(bytes=2 * (2 * X + 2 * Z) + state, flops=2 * partners * (X * tiles + Z) + 2 * K * V)

    forward = [scan, products(K, V)]
    backward = [scan, products(V, K), scan, products(V, K), products(K, V)]
    sums = {"forward": forward, "forward + backward": forward + backward}
    return {
        name: Cost(bytes=sum(c.bytes for c in parts), flops=sum(c.flops for c in parts)) for name, parts in sums.items()
    }


def lightning_subject(key_width: int, device: torch.device) -> Subject:
    """Constant decay per head; fla-core's simple_gla with the same decays; causal softmax attention."""
    log_decay = -(2.0 ** (-8 * torch.arange(1, HEADS + 1, device=device) / HEADS))
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "lightscale": lambda q, k, v: lightning_attention(q, k, v, log_decay)[0]
    }
    try:
        chunk_simple_gla = import_module("fla.ops.simple_gla").chunk_simple_gla
        ways["fla simple_gla"] = lambda q, k, v: chunk_simple_gla(q, k, v, g_gamma=log_decay, scale=1.0)[0]
    except ImportError:
        print("fla-core is not installed: no lines of its kernels", file=sys.stderr)
    if key_width == WIDTH:
        ways["flash attention"] = flash
    name = "lightning" if key_width == WIDTH else f"lightning {key_width}x{WIDTH}"
    return Subject(name=name, key_width=key_width, ways=ways, costs=lightning_costs(key_width, WIDTH))


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's flash attention, on views with heads before tokens."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return o.transpose(1, 2)


def device_ms(work: Callable[[], object], repeats: int) -> float:
    """Median of the device's time, with its second-level cache emptied before each run."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    for number in range(repeats + 2):  # the first compiles, the second warms up
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        if number == 1 and times[-1] > SLOW_S * 1e3:
            break
    return statistics.median(times[2:] or times[-1:])


def device_rates(repeats: int) -> tuple[float, float]:
    """Copy bandwidth in bytes read and written a second, and bf16 FLOP/s of a large product."""
    source, target = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy_ms = device_ms(lambda: target.copy_(source), repeats)
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product_ms = device_ms(lambda: x @ x, repeats)
    return 2 * 2**30 / copy_ms * 1e3, 2 * 8192**3 / product_ms * 1e3


def works(
    form: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor]
) -> dict[str, Callable[[], object]]:
    """``form`` forward, and with its backward."""
    do = torch.randn_like(inputs[2])

    def forward() -> object:
        with torch.no_grad():
            return form(*inputs)

    def both() -> object:
        return torch.autograd.grad(form(*inputs), inputs, do)

    return dict(zip(PASSES, (forward, both), strict=True))


def measure(subject: Subject, tokens: int, repeats: int, rates: tuple[float, float]) -> Iterator[Line]:
    """Every way and pass of one operator at one length; a way that does not fit in memory is left out."""
    shapes = (subject.key_width, subject.key_width, WIDTH)
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "generator": generator}
    inputs = [torch.randn(1, tokens, HEADS, width, **options).requires_grad_() for width in shapes]
    for way, form in subject.ways.items():
        for passes, work in works(form, inputs).items():
            try:
                ms = device_ms(work, repeats)
            except torch.cuda.OutOfMemoryError:
                print(f"{subject.name}, {way}, {passes}: {tokens} tokens do not fit", file=sys.stderr)
                continue
            ns = ms * 1e6 / (tokens * HEADS)
            cost = subject.costs[passes]
            floor = max(cost.bytes / rates[0], cost.flops / rates[1]) * 1e9 if way == "lightscale" else None
            yield Line(
                operator=subject.name,
                passes=passes,
                tokens=tokens,
                way=way,
                ms=ms,
                ns_per_token_head=ns,
                floor_ns=floor,
                times_floor=None if floor is None else ns / floor,
            )
            torch.cuda.empty_cache()


def tilings() -> Iterator[tuple[str, Any]]:
    """Other tiles for bf16, none of which spills: for ``--tune`` on a GPU that nobody has tuned for."""
    usual = import_module("lightscale.kernels.lightning.triton_tiling")._HALF
    yield "as shipped", usual
    for changes in (
        {"attend_stages": 2},
        {"width": 128},
        {"chunk": 256},
        {"scan_stages": 3},
        {"state_value": 128},
        {"state_value": 128, "scan_stages": 3},
    ):
        yield ", ".join(f"{name} {value}" for name, value in changes.items()), replace(usual, **changes)


def tune(repeats: int, tokens: int = 65536) -> dict[str, dict[str, float]]:
    """ns per token-head of lightning attention by tiling and pass."""
    module = import_module("lightscale.kernels.lightning.triton_tiling")
    found: dict[str, dict[str, float]] = {}
    for name, tiling in list(tilings()):
        module._HALF = tiling
        subject = lightning_subject(WIDTH, torch.device("cuda"))
        subject = replace(subject, ways={"lightscale": subject.ways["lightscale"]})
        lines = measure(subject, tokens, repeats, (1.0, 1.0))
        found[name] = {line.passes: line.ns_per_token_head for line in lines}
    module._HALF = next(tilings())[1]
    return found


def run_on_gpu(lengths: Sequence[int], repeats: int, *, with_tuning: bool) -> dict[str, Any]:
    """All figures of this GPU."""
    device = torch.device("cuda")
    rates = device_rates(repeats)
    subjects = [lightning_subject(width, device) for width in (WIDTH, 2 * WIDTH)]
    lines = [asdict(line) for s in subjects for n in lengths for line in measure(s, n, repeats, rates)]
    figures = {
        "device": torch.cuda.get_device_name(),
        "backend": backend_of(torch.empty(1, dtype=torch.bfloat16, device=device)),
        "triton": import_module("triton").__version__,
        "dtype": "bfloat16",
        "copy_gb_per_s": rates[0] / 1e9,
        "matmul_tflop_per_s": rates[1] / 1e12,
        "lines": lines,
    }
    return figures | ({"tilings": tune(repeats)} if with_tuning else {})


def run_on_cpu(repeats: int) -> dict[str, Any]:
    """Small shapes of the forms that CPUs use."""
    generator = torch.Generator().manual_seed(0)
    log_decay = -torch.tensor([0.01, 0.1])
    lines = []
    for tokens in (128, 512):
        inputs = [torch.randn(1, tokens, 2, 32, generator=generator).requires_grad_() for _ in range(3)]
        for way in ("chunked", "reference"):
            form = works(lambda q, k, v, way=way: lightning_attention(q, k, v, log_decay, backend=way)[0], inputs)
            for passes, work in form.items():
                work()
                times = []
                for _ in range(repeats):
                    start = time.perf_counter()
                    work()
                    times.append((time.perf_counter() - start) * 1e3)
                ms = statistics.median(times)
                line = Line(
                    operator="lightning",
                    passes=passes,
                    tokens=tokens,
                    way=way,
                    ms=ms,
                    ns_per_token_head=ms * 1e6 / (tokens * 2),
                    floor_ns=None,
                    times_floor=None,
                )
                lines.append(asdict(line))
    return {"device": "cpu", "note": NO_GPU, "dtype": "float32", "lines": lines}


def run(*, lengths: Sequence[int] = LENGTHS, repeats: int = 10, with_tuning: bool = False) -> dict[str, Any]:
    """Measure on this machine's GPU, or say that there is none; what ``--json`` prints."""
    settings = {"torch": torch.__version__, "date": date.today().isoformat(), "repeats": repeats}
    if not torch.cuda.is_available():
        return settings | {"heads": 2, "width": 32} | run_on_cpu(repeats)
    figures = run_on_gpu(lengths, repeats, with_tuning=with_tuning)
    return settings | {"heads": HEADS, "width": WIDTH} | figures


def table(figures: dict[str, Any]) -> Table:
    """The lines for people."""
    title = f"{figures['device']}, {figures['dtype']}, {figures['heads']} heads of width {figures['width']}"
    if "copy_gb_per_s" in figures:
        title += f"; copy {figures['copy_gb_per_s']:.0f} GB/s, product {figures['matmul_tflop_per_s']:.0f} TFLOP/s"
    made = Table("operator", "pass", "way", title=title)
    for column in ("tokens", "ms", "ns/token-head", "floor", "× floor"):
        made.add_column(column, justify="right")
    for x in figures["lines"]:
        floor = ("", "") if x["floor_ns"] is None else (f"{x['floor_ns']:.2f}", f"{x['times_floor']:.2f}")
        numbers = (str(x["tokens"]), f"{x['ms']:.3f}", f"{x['ns_per_token_head']:.2f}", *floor)
        made.add_row(x["operator"], x["passes"], x["way"], *numbers)
    return made


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="figures for machines")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of the row, on a GPU")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tune", action="store_true", help="also time other tiles of the kernels, on a GPU")
    args = parser.parse_args()
    figures = run(lengths=args.lengths, repeats=args.repeats, with_tuning=args.tune)
    if args.json:
        print(json.dumps(figures))
    else:
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(table(figures))
        for name, by_pass in figures.get("tilings", {}).items():
            console.print(f"tiling {name}: " + ", ".join(f"{p} {ns:.2f} ns" for p, ns in by_pass.items()))
        if "note" in figures:
            console.print(figures["note"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
