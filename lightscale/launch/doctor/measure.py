"""Speed of computation and exchange of each rank, compared with its peers, to detect slow or broken machines.

All ranks do the same work at the same time, in rounds. The best round counts, so that a machine that is busy for a
moment is not reported as slow. Each rank is compared with the median of the others, without its own speed.
"""

import hashlib
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lightscale.training.health.check_result import CheckResult

# Of the others' median. CPUs are shared with other work, and GPUs of one kind differ by a few per cent.
_SLOW = {"cpu": 0.5, "cuda": 0.85}
# The rate of a pair depends on the switches between its hosts, so that only a large difference says something.
_SLOW_EXCHANGE = 0.5
_ROUNDS = 3
_ROUND_S = {"cpu": 0.4, "cuda": 0.5}
# With 8192 a product has 1.1 TFLOP: arithmetic decides its time, neither memory nor the start of kernels.
_SIDE = {"cpu": 512, "cuda": 8192}
# Large enough for bandwidth, not latency, to decide.
_EXCHANGE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}


@dataclass(frozen=True, kw_only=True)
class Product:
    """Result of one rank's matrix products."""

    flops: float
    """FLOP/s in the best round."""
    digest: str
    """Digest of the result; equal on machines of one kind."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The ranks that measure together, each with its device; `barrier` waits for all."""

    rank: int
    size: int
    device: torch.device
    hosts: Sequence[str]
    """Host of each rank."""
    group: dist.ProcessGroup | None
    """Process group for tensors of `device`; None: a single rank."""
    barrier: Callable[[], None]


def measure_product(peers: Peers) -> Product:
    """Multiply one pair of matrices repeatedly: bf16 on GPUs, fp32 on CPUs."""
    kind = peers.device.type
    side, dtype = _SIDE[kind], torch.bfloat16 if kind == "cuda" else torch.float32
    # Drawn on the CPU, so that all ranks have the same numbers.
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator).to(peers.device, dtype) for _ in range(2))
    # Not timed, because the first product loads the library and its kernels.
    result = a @ b
    best = 0.0
    for _ in range(_ROUNDS):
        peers.barrier()
        _finish(peers.device)
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < _ROUND_S[kind]:
            # GPUs get eight products at once, so that the wait for the result below costs little of the time.
            for _ in range(8 if kind == "cuda" else 1):
                torch.mm(a, b, out=result)
                count += 1
            _finish(peers.device)
        best = max(best, count * 2 * side**3 / (time.perf_counter() - began))
    content = result.float().cpu().numpy().tobytes()
    return Product(flops=best, digest=hashlib.sha256(content).hexdigest())


def processor() -> str:
    """Model of this machine's processor, which decides the rounding of products."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def judge_products(products: Sequence[Product], kinds: Sequence[str], device: str) -> list[CheckResult]:
    """Report ranks that are slower than the others, or have wrong numbers. `kinds`: kinds of machine, by rank."""
    rates = [product.flops for product in products]
    results = _slow("matrix product", rates, "FLOP/s", _SLOW[device])
    for kind in sorted(set(kinds)):
        own = [rank for rank, one in enumerate(kinds) if one == kind]
        # Only among machines of one kind: others have other kernels, which round in another way.
        usual = Counter(products[rank].digest for rank in own).most_common(1)[0][0]
        wrong = tuple(rank for rank in own if products[rank].digest != usual)
        if wrong:
            found = f"result differs from the other machines with {kind}, for the same matrices"
            results.append(
                CheckResult(
                    check="matrix product",
                    result="failed",
                    found=found,
                    right="equal bits: this device or its memory is broken; replace it",
                    ranks=wrong,
                    # Of two that differ nothing says which is right; a minority is wrong.
                    blames_host=2 * len(wrong) < len(own),
                )
            )
    return results or [CheckResult(check="matrix product", result="ok", found=_range(rates, "FLOP/s"))]


def measure_all_reduce(peers: Peers) -> tuple[float, bool]:
    """Bytes/s in and out of each rank in the best of several all-reduces, and whether the sums were right."""
    assert peers.group is not None
    numbers = _EXCHANGE_BYTES[peers.device.type] // 4
    # Small whole numbers: any order of summation gives exactly the same.
    # With at most 2,364 ranks all sums are less than 2^24, up to which fp32 has every whole number.
    pattern = torch.arange(numbers, device=peers.device, dtype=torch.float32) % 7
    best, is_right = 0.0, True
    for _ in range(_ROUNDS):
        values = pattern * (peers.rank + 1)
        peers.barrier()
        _finish(peers.device)
        began = time.perf_counter()
        dist.all_reduce(values, group=peers.group)
        _finish(peers.device)
        elapsed_s = time.perf_counter() - began
        # What a ring sends through each rank; nccl-tests calls it the bus bandwidth.
        best = max(best, 2 * (peers.size - 1) / peers.size * 4 * numbers / elapsed_s)
        is_right = is_right and torch.equal(values, pattern * (peers.size * (peers.size + 1) // 2))
    return best, is_right


def judge_all_reduce(results: Sequence[tuple[float, bool]]) -> list[CheckResult]:
    """Judge the all-reduce: its speed cannot identify a rank, because it waits for the slowest, but wrong sums can."""
    wrong = tuple(rank for rank, (_, is_right) in enumerate(results) if not is_right)
    if wrong:
        found, right = "wrong sums", "exact sums: check the links of these hosts, and NCCL's version"
        return [CheckResult(check="all-reduce", result="failed", found=found, right=right, ranks=wrong)]
    rate = min(rate for rate, _ in results)
    return [CheckResult(check="all-reduce", result="ok", found=f"{_metric(rate)}B/s in and out of each rank")]


def measure_exchange(peers: Peers) -> float:
    """Bytes/s to and from another rank at the same time, in the best of several pairings.

    The partner is on another host if there is one. A slow rank is slow with all partners; its partners are fast with
    others.
    """
    assert peers.group is not None
    numbers = _EXCHANGE_BYTES[peers.device.type] // 4
    own = torch.full((numbers,), float(peers.rank), device=peers.device)
    other = torch.empty_like(own)
    best = 0.0
    for partners in pairings(peers.hosts)[:_ROUNDS]:
        partner = partners.get(peers.rank)
        for _ in range(_ROUNDS):
            peers.barrier()
            # After the barrier, which needs every rank: those that pause in this round too.
            if partner is None:
                continue
            began = time.perf_counter()
            sending = dist.P2POp(dist.isend, own, partner, group=peers.group)
            receiving = dist.P2POp(dist.irecv, other, partner, group=peers.group)
            for work in dist.batch_isend_irecv([sending, receiving]):
                work.wait()
            _finish(peers.device)
            best = max(best, 2 * 4 * numbers / (time.perf_counter() - began))
    return best


def judge_exchange(rates: Sequence[float]) -> list[CheckResult]:
    """Report ranks that exchange more slowly than the others."""
    results = _slow("exchange of pairs", rates, "B/s", _SLOW_EXCHANGE)
    return results or [CheckResult(check="exchange of pairs", result="ok", found=_range(rates, "B/s"))]


def pairings(hosts: Sequence[str]) -> list[dict[int, int]]:
    """Rounds of partners, by rank: each pair of ranks meets once. With several hosts, partners are on different hosts.

    If hosts have different numbers of ranks, some ranks pause.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return _tournament(len(hosts))
    ranks = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
    rounds = []
    for pairs in _tournament(len(names)):
        together = [(ranks[a], ranks[b]) for a, b in pairs.items()]
        rounds.append({mine: theirs for a, b in together for mine, theirs in zip(a, b, strict=False)})
    return rounds


def _tournament(size: int) -> list[dict[int, int]]:
    """A round-robin of `size` players: one keeps its position, the others rotate."""
    players: list[int | None] = [*range(size)] + [None] * (size % 2)
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        met = [(a, b) for a, b in pairs if a is not None and b is not None]
        rounds.append({one: other for a, b in met for one, other in ((a, b), (b, a))})
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def _slow(check: str, rates: Sequence[float], unit: str, least: float) -> list[CheckResult]:
    results = []
    for rank, rate in enumerate(rates):
        others = [*rates[:rank], *rates[rank + 1 :]]
        usual = statistics.median(others) if others else rate
        if rate < least * usual:
            results.append(
                CheckResult(
                    check=check,
                    result="failed",
                    found=f"{_metric(rate)}{unit}, {rate / usual:.0%} of the others' {_metric(usual)}{unit}",
                    right=f"at least {least:.0%}: check other processes there, temperature, clocks and links",
                    ranks=(rank,),
                    blames_host=True,
                )
            )
    return results


def _range(rates: Sequence[float], unit: str) -> str:
    least, most = (f"{_metric(rate)}{unit}" for rate in (min(rates), max(rates)))
    return least if least == most else f"{least} to {most}"


def _metric(value: float) -> str:
    """12.3 G"""
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} T"


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
