"""Our kernels beside fla-core's, flash attention and their floor: ``python tools/bench.py kernels``.

On a GPU everything runs in bf16 in one process, forward and forward + backward. The floor of a line is the time that
its bytes take at the copy bandwidth, or its FLOPs at the matrix rate, both measured first. Without a GPU the same code
times the forms that CPUs use at small sizes, which shows that it works and nothing about GPUs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.subjects import BOTH, FLA, FORWARD, OURS, PASSES, Cost, Form, Setting, Subject, subjects
from cuda_twin.installation import NOTE, in_twin
from lightscale.kernels.common.backends import choose_backend

# (rows, tokens of a row): from 8K to 1M tokens.
SHAPES = ((1, 8192), (1, 32768), (1, 131072), (16, 8192), (1, 1048576))
CPU_SHAPES = ((1, 128), (2, 256))
GPU_SETTING: dict[str, Any] = {"dtype": torch.bfloat16, "num_heads": 16, "width": 128}
SMALL: dict[str, Any] = {"num_heads": 2, "width": 32}
TARGET_DEVICE = "H200"

NO_GPU = (
    "no GPU: these lines time the CPU forms at small shapes. Run the same command on a GPU for figures of the kernels."
)
NOT_FULL = "small sizes, at which launches take longer than the work: this shows that every line runs, not its speed."
# A call that takes longer than this is not repeated.
SLOW_MS = 2000.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measurement."""

    operator: str
    way: str
    passes: str
    rows: int
    tokens: int
    """Of a row."""
    ms: float
    """The median."""
    samples_ms: list[float]
    ns_per_token_head: float
    floor_ns: float | None
    """Per token-head; None for others' ways, whose traffic is not ours to count."""
    times_floor: float | None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A measurement that there is not: it did not fit in memory, or did not run."""

    operator: str
    way: str
    passes: str
    rows: int
    tokens: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the device can do."""

    copy_bytes_per_s: float
    """Read and written, of a large copy."""
    matmul_flops: float
    """FLOP/s of a large product in the dtype of the measurement."""

    def floor_ns(self, cost: Cost) -> float:
        """The least time for ``cost``."""
        return max(cost.bytes / self.copy_bytes_per_s, cost.flops / self.matmul_flops) * 1e9


class Timer:
    """Milliseconds of one computation, with the device's second-level cache emptied before."""

    def __init__(self, device: torch.device, *, small: bool = False) -> None:
        self._on_gpu = device.type == "cuda"
        self._small = small or not self._on_gpu
        self._flush = torch.empty(2**28 if self._on_gpu else 0, dtype=torch.uint8, device=device)

    def ms(self, work: Callable[[], object]) -> float:
        """By the device's clock on a GPU, by the wall's elsewhere."""
        if not self._on_gpu:
            began = time.perf_counter()
            work()
            return (time.perf_counter() - began) * 1e3
        self._flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def samples_ms(self, work: Callable[[], object], repeats: int, *, compiled: bool = False) -> list[float]:
        """``repeats`` runs behind one that may compile; a single one where runs are slow.

        ``compiled``: the same work has run at another size, so that a slow first run is slow by itself.
        """
        first = self.ms(work)
        if compiled and first > SLOW_MS:
            return [first]
        second = self.ms(work)
        return [second] if second > SLOW_MS else [self.ms(work) for _ in range(repeats)]

    def rates(self, setting: Setting, repeats: int) -> Rates:
        """Of this device: 1 GiB copied, and a product of 8192 by 8192 (where small 64 MiB and 512)."""
        num_bytes, side = (2**26, 512) if self._small else (2**30, 8192)
        source, target = (torch.empty(num_bytes, dtype=torch.uint8, device=setting.device) for _ in range(2))
        copy_ms = statistics.median(self.samples_ms(lambda: target.copy_(source), repeats))
        x = torch.randn(side, side, dtype=setting.dtype, device=setting.device)
        product_ms = statistics.median(self.samples_ms(lambda: x @ x, repeats))
        return Rates(copy_bytes_per_s=2 * num_bytes / copy_ms * 1e3, matmul_flops=2 * side**3 / product_ms * 1e3)


def works(form: Form, inputs: Sequence[Tensor], do: Tensor) -> dict[str, Callable[[], object]]:
    """``form`` forward, and with its backward."""
    leaves = [x for x in inputs if x.requires_grad]

    def forward() -> object:
        with torch.no_grad():
            return form(*inputs)

    return {FORWARD: forward, BOTH: lambda: torch.autograd.grad(form(*inputs), leaves, do)}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all measurements share."""

    setting: Setting
    timer: Timer
    rates: Rates
    repeats: int
    small: bool = False
    """Sizes of a CPU, wherever it runs."""

    @classmethod
    def here(cls, repeats: int, *, small: bool = False) -> "Bench":
        """On the GPU, or without one on the CPU, where sizes are small; with its rates, measured now."""
        on_gpu = torch.cuda.is_available()
        small = small or not on_gpu
        device = torch.device("cuda" if on_gpu else "cpu")
        # CPUs have no kernels of half precision.
        sizes = GPU_SETTING | (SMALL if small else {}) | ({} if on_gpu else {"dtype": torch.float32})
        setting = Setting(device=device, **sizes)
        timer = Timer(device, small=small)
        rates = timer.rates(setting, repeats)
        return cls(setting=setting, timer=timer, rates=rates, repeats=repeats, small=small)

    def measure(self, subject: Subject, way: str, shape: tuple[int, int], *, compiled: bool) -> list[Line | Failure]:
        """The passes of one way to compute an operator at one shape."""
        rows, tokens = shape
        found: list[Line | Failure] = []
        for passes in PASSES:
            what: dict[str, Any] = {
                "operator": subject.name, "way": way, "passes": passes, "rows": rows, "tokens": tokens,
            }  # fmt: skip
            try:
                if self.setting.device.type == "cuda":
                    torch.cuda.empty_cache()
                inputs = subject.inputs(rows, tokens)
                work = works(subject.ways[way], inputs, torch.randn_like(inputs[2]))[passes]
                samples = self.timer.samples_ms(work, self.repeats, compiled=compiled)
            except Exception as error:  # noqa: BLE001 - one way that fails must not cost the others' lines
                found.append(Failure(**what, reason=_reason(error)))
            else:
                cost = subject.costs.get(passes) if way == OURS else None
                found.append(self._line(what, samples, None if cost is None else self.rates.floor_ns(cost)))
        return found

    def _line(self, what: dict[str, Any], samples: list[float], floor: float | None) -> Line:
        ms = statistics.median(samples)
        ns = ms * 1e6 / (what["rows"] * what["tokens"] * self.setting.num_heads)
        times_floor = None if floor is None else ns / floor
        return Line(**what, ms=ms, samples_ms=samples, ns_per_token_head=ns, floor_ns=floor, times_floor=times_floor)


def _reason(error: Exception) -> str:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "does not fit in memory"
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def difference(subject: Subject, rows: int, tokens: int) -> dict[str, float]:
    """How far the others' outputs and gradients are from ours: the largest RMSE ratio, by way."""
    inputs = subject.inputs(rows, tokens)
    do = torch.randn_like(inputs[2])
    leaves = [x for x in inputs if x.requires_grad]

    def results(form: Form) -> list[Tensor]:
        o = form(*inputs)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    (_, ours), *others = subject.ways.items()
    expected = results(ours) if others else []
    found = {}
    for way, form in others:
        try:
            pairs = zip(results(form), expected, strict=True)
            found[way] = max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs)
        except Exception as error:  # noqa: BLE001 - as above; its lines say that it failed, too
            print(f"{subject.name}, {way}: {_reason(error)}", file=sys.stderr)
    return found


def judge(figures: dict[str, Any]) -> dict[str, Any]:
    """What the lines say about the targets: every line of ours, and those that miss.

    A line reaches its target on the device that targets are set for, and is to be faster than fla-core on any.
    """
    times = {_case(line): line["ns_per_token_head"] for line in figures["lines"]}
    failed = {_case(failure): failure["reason"] for failure in figures["failures"]}
    with_targets = TARGET_DEVICE in figures["device"]
    judged, missed, not_compared = [], [], []
    for case in [case for case in (*times, *failed) if case[1] == OURS]:
        operator, _, passes, *shape = case
        named = f"{operator}, {passes}, {shape[0]} x {shape[1]}"
        if case in failed:
            missed.append(f"{named}: {failed[case]}")
            continue
        ours, fla = times[case], times.get((operator, FLA, *case[2:]))
        target = figures["targets_ns"].get(operator, {}).get(passes) if with_targets else None
        if target is not None and ours > target:
            missed.append(f"{named}: {ours:.2f} ns, target {target:.2f}")
        if fla is None:
            not_compared.append(named)
        elif ours >= fla:
            missed.append(f"{named}: {ours:.2f} ns, fla-core {fla:.2f}")
        judged.append(
            dict(zip(("operator", "way", "passes", "rows", "tokens"), case, strict=True))
            | {"ns": ours, "target_ns": target, "fla_ns": fla, "times_faster_than_fla": fla and fla / ours}
        )
    return {"lines": judged, "missed": missed, "not_compared_with_fla": not_compared}


def _case(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("operator", "way", "passes", "rows", "tokens"))


def run(bench: Bench, shapes: Sequence[tuple[int, int]] | None) -> Iterator[dict[str, Any]]:
    """The figures so far, after every line."""
    on_gpu = bench.setting.device.type == "cuda"
    yield from sweep(bench, shapes or (SHAPES if on_gpu and not bench.small else CPU_SHAPES), with_fla=on_gpu)


def sweep(bench: Bench, shapes: Sequence[tuple[int, int]], *, with_fla: bool) -> Iterator[dict[str, Any]]:
    """Every operator at every shape, the smallest first."""
    shapes = sorted(set(shapes), key=lambda shape: (shape[0] * shape[1], shape))
    found = subjects(bench.setting, with_fla=with_fla)
    figures = facts(bench) | {
        "shapes": [f"{rows}x{tokens}" for rows, tokens in shapes],
        "targets_ns": {subject.name: subject.target_ns for subject in found if subject.target_ns},
        "difference_from_ours": {},
        "lines": [],
        "failures": [],
    }
    for subject in found:
        figures["difference_from_ours"][subject.name] = difference(subject, *shapes[0])
    for number, shape in enumerate(shapes):
        # Others' kernels last: one that reads where it must not costs the process its GPU.
        for others in (False, True):
            for subject, way in [(s, way) for s in found for way in s.ways if (way == FLA) == others]:
                for one in bench.measure(subject, way, shape, compiled=number > 0):
                    print(said(one), file=sys.stderr, flush=True)
                    figures["failures" if isinstance(one, Failure) else "lines"].append(asdict(one))
                    yield figures | {"verdict": judge(figures)}


def facts(bench: Bench) -> dict[str, Any]:
    """What the lines depend on."""
    setting, on_gpu = bench.setting, bench.setting.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(setting.device) if on_gpu else "cpu",
        "backend": choose_backend("lightning", torch.empty(1, dtype=setting.dtype, device=setting.device)),
        "versions": {name: _version(name) for name in ("triton", "fla-core")},
        "dtype": str(setting.dtype).removeprefix("torch."),
        "heads": setting.num_heads,
        "width": setting.width,
        "copy_gb_per_s": bench.rates.copy_bytes_per_s / 1e9,
        "matmul_tflop_per_s": bench.rates.matmul_flops / 1e12,
        "note": _note(bench),
    }


def _note(bench: Bench) -> str | None:
    if bench.setting.device.type != "cuda":
        return NO_GPU
    return " ".join([NOTE] * in_twin() + [NOT_FULL] * bench.small) or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def said(one: Line | Failure) -> str:
    """A line of progress."""
    what = f"{one.operator}, {one.way}, {one.passes}, {one.rows} x {one.tokens}"
    if isinstance(one, Failure):
        return f"{what}: {one.reason}"
    floor = "" if one.times_floor is None else f", {one.times_floor:.2f} times the floor"
    return f"{what}: {one.ms:.3f} ms, {one.ns_per_token_head:.2f} ns per token-head{floor}"


def table(figures: dict[str, Any]) -> Table:
    """The lines for people."""
    title = (
        f"{figures['device']}, {figures['dtype']}, {figures['heads']} heads of width {figures['width']}; "
        f"copy {figures['copy_gb_per_s']:.0f} GB/s, product {figures['matmul_tflop_per_s']:.3g} TFLOP/s"
    )
    made = Table("operator", "pass", "way", title=title, caption=_caption(figures))
    for column in ("rows x tokens", "ms", "ns/token-head", "× floor", "target"):
        made.add_column(column, justify="right")
    on_target = TARGET_DEVICE in figures["device"]
    for x in figures["lines"]:
        target = figures["targets_ns"].get(x["operator"], {}).get(x["passes"]) if on_target else None
        made.add_row(
            x["operator"],
            x["passes"],
            x["way"],
            f"{x['rows']} x {x['tokens']}",
            f"{x['ms']:.3f}",
            f"{x['ns_per_token_head']:.2f}",
            "" if x["times_floor"] is None else f"{x['times_floor']:.2f}",
            f"{target:.2f}" if target and x["way"] == OURS else "",
        )
    return made


def _caption(figures: dict[str, Any]) -> str:
    """What the verdict is, and what there is no line of."""
    verdict = figures["verdict"]
    parts = [f"missed: {one}" for one in verdict["missed"]]
    if figures["note"]:
        parts.append(figures["note"])
    elif not parts:
        parts = ["nothing missed"]
    if verdict["not_compared_with_fla"] and figures["backend"] == "triton":
        parts.append(f"no line of fla-core beside {len(verdict['not_compared_with_fla'])} lines")
    return "\n".join(parts)


def shape(text: str) -> tuple[int, int]:
    """``4x8192``: four rows of 8192 tokens."""
    rows, _, tokens = text.partition("x")
    if not (rows.isdecimal() and tokens.isdecimal() and int(rows) and int(tokens)):
        raise argparse.ArgumentTypeError(f"must be ROWSxTOKENS, for example 4x8192, not {text!r}")
    return int(rows), int(tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py kernels``."""
    parser.add_argument(
        "--shapes",
        type=shape,
        nargs="+",
        metavar="ROWSxTOKENS",
        help=f"(default {' '.join(f'{rows}x{tokens}' for rows, tokens in SHAPES)}; small ones without a GPU)",
    )
    parser.add_argument(
        "--small", action="store_true", help=("use the sizes of a CPU on a GPU too, to test that every line runs")
    )
    parser.add_argument("--tune", action="store_true", help="also time other tiles of the kernels, on a GPU")
