"""Null runs from outside: a process of the twin for each, and its records as a table."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from cuda_twin.cases import BUDGETED, asked
from cuda_twin.installation import Twin, run_in_twin
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.planning.hardware import H100
from lightscale.planning.plan import plan

_MIB, _GIB = 2**20, 2**30
_LAUNCH_S = 2e-5
"""Of an operation or a Triton kernel, from Python, or of a wait for one; assumed, high."""
_FP32_FLOPS = 67e12 * 0.5
"""Half of what an H100 has outside of its tensor cores (data sheet; the half is assumed)."""

BUDGET_HEAD, MEMORY_HEAD, KERNEL_HEAD = "a step of a rank", "memory of a rank", "kernels compared"
TRAFFIC_HEAD, STREAM_HEAD = "bytes that a rank gives in a step", "stream"
"""With which the tables begin, in the documentation too."""
_GRADIENTS = "data_parallel_group_with_cp"


def record(twin: Twin, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What ``null_run`` writes of each of ``cases``, the fields of a ``NullCase``; one process runs them in turn.

    Raises:
        UserError: the run failed; it has said why.
    """
    with tempfile.TemporaryDirectory(prefix="null-case-") as folder:
        given, found = Path(folder) / "cases.json", Path(folder) / "found.json"
        given.write_text(json.dumps(list(cases)), encoding="utf-8")
        done = run_in_twin(twin, ["-m", "cuda_twin.null_run", given, found], timeout_s=3600)
        if done.returncode or not found.exists():
            raise UserError(f"a null run failed with exit code {done.returncode}:\n{done.output[-4000:]}")
        made: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))
        return made


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """The last step, for people."""
    step, case = found["steps"][-1], found["case"]
    ran = f"rank {case['rank']} of {case['world_size']}, {case['micro_batches']} micro-batches"
    lines = [(kind, f"{count:,}", "") for kind, count in step["launches"].items()]
    lines.append(("launches in total", f"{step['launches_in_all']:,}", f"{found['layers']} layers; {ran}"))
    lines.append(("FLOPs of matrix products", f"{step['product_flops']:.4g}", ""))
    planned = found["planned"]["total_bytes"]
    ratio = f"planned {planned / _GIB:.2f}: {100 * (step['peak_bytes'] / planned - 1):+.1f} %"
    lines.append(("peak of the allocator, GiB", f"{step['peak_bytes'] / _GIB:.2f}", ratio))
    lines.append(("reserved, GiB", f"{found['reserved_bytes'] / _GIB:.2f}", "with the allocator's gaps"))
    yield _table(("null device", "", ""), lines)
    yield _table(
        ("host waits", "", "where"),
        [(wait["call"], f"{wait['count']:,}", wait["where"]) for wait in step["host_waits"]],
    )
    yield _table(
        ("collectives", "calls", "MiB", "ranks", "stream"),
        [
            (
                f"{one['group'] or 'all'}: {one['call']}",
                f"{one['calls']:,}",
                f"{one['bytes'] / _MIB:,.2f}",
                f"{one['ranks']:,}",
                hex(one["stream"]),
            )
            for one in step["collectives"]
        ],
    )
    yield _table(
        ("stream", "work"),
        [
            (stream, ", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
            for stream, counts in step["streams"].items()
        ],
    )
    yield _table(
        ("memory at the peak", "MiB"),
        [(line, f"{size / _MIB:,.0f}") for line, size in list(found["peak_by_line"].items())[:12]],
    )
    faults = [(fault, f"{count:,}") for fault, count in found["faults"].items()]
    faults += [(f"unexpected: {call}", f"{count:,}") for call, count in step["allocations"].items()]
    faults += [(one["race"], f"{one['times']:,}") for one in found["waits"]["races"]]
    if faults:
        yield _table(("faults", ""), faults)
    if found["large"]:
        yield _table(("elements beyond 2^31", ""), [(name, f"{count:,}") for name, count in found["large"].items()])


def budget_rows(
    found: Mapping[str, Mapping[str, Any]], before: Mapping[str, Mapping[str, int]]
) -> list[tuple[str, ...]]:
    """What each case asks for in a step; where its budget is another number, that one behind it."""
    rows: list[tuple[str, ...]] = []
    for name, one in found.items():
        budget = before.get(name, {})
        counts = [
            f"{count:,}" + (f" of {budget[key]:,}" if budget.get(key, count) != count else "")
            for key, count in asked(one).items()
        ]
        # Nothing waits where kernels are compared: one stream has it all.
        waits = one.get("waits", {"accesses": 0, "races": []})
        looked_at = f"{waits['accesses']:,}", str(len(waits["races"]))
        rows.append((name, *counts, f"{one['steps'][-1]['peak_bytes'] / _GIB:.2f}", *looked_at))
    return rows


def budget_table(rows: Sequence[tuple[str, ...]]) -> Table:
    """Of ``budget_rows``."""
    return _table((BUDGET_HEAD, *(key.replace("_", " ") for key in BUDGETED), "peak, GiB", "accesses", "races"), rows)


def given_bytes(found: Mapping[str, Any], group: str, call: str = "") -> int:
    """What a rank gives to a group's collectives in the last step; ``call``: of one kind, else all but receiving."""
    kinds = [one for one in found["steps"][-1]["collectives"] if one["group"] == group]
    return sum(one["bytes"] for one in kinds if (one["call"] == call if call else one["call"] != "Recv"))


def planned_state_bytes(found: Mapping[str, Any]) -> int | None:
    """What a rank gives to the exchanges of states in a step, by planning; None where that has no formula.

    For every layer, micro-batch and direction; a stage's share of the layers is not planned.
    """
    config = load(found["case"]["config"], found["case"]["overrides"])
    if found["layout"]["sequence"] == 1 or found["layout"]["pipeline"] > 1:
        return None
    planned = 0
    for exchange in plan(config, found["case"]["world_size"]).exchanges:
        if exchange.forward_bytes is None or exchange.backward_bytes is None:
            return None
        first, last = exchange.layers or (0, 0)
        planned += (last - first + 1) * (exchange.forward_bytes + exchange.backward_bytes)
    return int(planned * found["case"]["micro_batches"])


def traffic_rows(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """What each case that exchanges states gives to collectives, each beside what planning says."""
    rows: list[tuple[str, ...]] = []
    for name, one in found.items():
        if not (states := planned_state_bytes(one)):
            continue
        ranks = one["layout"]["data"] * one["layout"]["sequence"]
        pairs = (
            (given_bytes(one, "states"), states),
            (given_bytes(one, _GRADIENTS, "ReduceScatter"), one["planned"]["gradients_bytes"]),
            (ranks * given_bytes(one, _GRADIENTS, "AllGather"), one["planned"]["weights_bytes"]),
        )
        rows.append((name, *(f"{size:,}" for pair in pairs for size in pair)))
    return rows


def stream_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Which stream has which work in the last step of a run."""
    step = found["steps"][-1]
    rows: list[tuple[str, ...]] = []
    for stream, counts in step["streams"].items():
        calls = [
            f"{one['group'] or 'all'}: {one['calls']} {one['call']}"
            for one in step["collectives"]
            if hex(one["stream"]) == stream
        ]
        work = [
            f"{counts[kind]:,} {kind}" for kind in ("launch", "triton", "product", "copy", "wait") if kind in counts
        ]
        rows.append((stream, ", ".join(work), "; ".join(calls)))
    return rows


def off_plan(found: Mapping[str, Any]) -> float:
    """By how much the largest peak of a run's steps is above what planning says, as a share of that."""
    return float(max(step["peak_bytes"] for step in found["steps"]) / found["planned"]["total_bytes"] - 1)


def memory_rows(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The peak of each case beside what planning says."""
    return [
        (
            name,
            f"{max(step['peak_bytes'] for step in one['steps']) / _GIB:.2f}",
            f"{one['planned']['total_bytes'] / _GIB:.2f}",
            f"{100 * off_plan(one):+.1f} %",
        )
        for name, one in found.items()
    ]


def memory_table(rows: Sequence[tuple[str, ...]]) -> Table:
    """Of ``memory_rows``."""
    return _table((MEMORY_HEAD, "peak, GiB", "planned, GiB", "off"), rows)


def comparison_s(found: Mapping[str, Any]) -> float:
    """Seconds that an H100 takes to compare kernels, once they are compiled: simulated.

    Nothing runs beside anything: launches, then products, which the kernels compute once more, then memory.
    """
    step = found["steps"][-1]
    launches = step["launches_in_all"] + step["host_waits_in_all"]
    products = 2 * step["product_flops"] / _FP32_FLOPS
    return float(launches * _LAUNCH_S + products + found["accessed_bytes"] / H100.memory_bytes_s)


def kernel_rows(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """What comparing the kernels of each case asks for."""
    return [
        (
            name,
            *(f"{asked(one)[key]:,}" for key in ("launches", "host_waits")),
            f"{one['steps'][-1]['product_flops'] / 1e12:.2f}",
            f"{one['accessed_bytes'] / 1e9:.0f}",
            f"{one['steps'][-1]['peak_bytes'] / _GIB:.2f}",
            f"{comparison_s(one):.2f}",
        )
        for name, one in found.items()
    ]


def kernel_table(rows: Sequence[tuple[str, ...]]) -> Table:
    """Of ``kernel_rows``."""
    head = ("launches", "host waits", "TFLOP", "GB read and written", "peak, GiB", "seconds, simulated")
    return _table((KERNEL_HEAD, *head), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE)
    for number, title in enumerate(head):
        table.add_column(title, justify="left" if number in (0, len(head) - 1) else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
