"""``lightscale plan CONFIG --nodes …``: predicted speed and memory on nodes of GPUs, by nodes and sequence length."""

import argparse
import dataclasses
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.planning import memory, step_cost
from lightscale.planning.hardware import HARDWARE, Hardware, with_settings
from lightscale.planning.prediction import Prediction
from lightscale.planning.search import AXES, BATCH_TOLERANCE, Fixed, best_layouts, explain_none

EXIT_NOTHING_FITS = 1
_SHOWN_LAYOUTS = 5
_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_NUMBER = re.compile(r"([0-9]+)([kKmM]?)")
_OPTIONS = ("length", "layout", "hardware", "settings")


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is predicted for one number of nodes and one length."""

    nodes: int
    sequence_length: int
    layouts: list[Prediction]
    """Best first; empty if there is none."""

    @property
    def fits(self) -> bool:
        """Whether any layout does."""
        return bool(self.layouts) and self.layouts[0].fits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the prediction."""
    group = parser.add_argument_group("prediction of speed and memory on nodes of GPUs (not measured)")
    group.add_argument("--nodes", metavar="N", help="number of nodes: 8, or 1,8,128, or 1..128 by doubling")
    group.add_argument(
        "--length", metavar="TOKENS", help="sequence length: 8K, or 8K,1M, or 8K..4M by doubling (default: CONFIG's)"
    )
    group.add_argument(
        "--layout",
        metavar="AXIS=N,…",
        help="choices to fix instead of searching them: tensor, pipeline, sequence, data, recompute, exchange",
    )
    group.add_argument("--hardware", choices=HARDWARE, help="kind of GPU (default: h100)")
    group.add_argument(
        "--set", dest="settings", action="append", metavar="NAME=NUMBER", help="replace a hardware number"
    )


def refuse_without_nodes(args: argparse.Namespace) -> None:
    """UserError for an option of the prediction that would be without effect."""
    for name in _OPTIONS:
        if getattr(args, name) is not None:
            option = "set" if name == "settings" else name
            raise UserError(f"--{option} requires --nodes, the number of nodes to predict for; use --nodes 1 for one")


def run(args: argparse.Namespace) -> int:
    """Print the prediction; 1 where no layout fits anywhere."""
    if args.processes is not None:
        raise UserError(
            f"--processes {args.processes} and --nodes {args.nodes}: use only one of them; a node has one rank per GPU"
        )
    hardware = with_settings(HARDWARE[args.hardware or "h100"], args.settings or [])
    fixed = Fixed.parse(args.layout or "")
    nodes = _series("--nodes", args.nodes)
    config = load(args.config, args.overrides)
    lengths = _series("--length", args.length) if args.length else [config.data.sequence_length]
    points = _predict(config, nodes, lengths, hardware, fixed)
    if args.json:
        print(json.dumps({"config": str(args.config), **_record(config, hardware, points)}, indent=2))
    else:
        _show(str(args.config), config, hardware, points)
    return 0 if any(point.fits for point in points) else EXIT_NOTHING_FITS


def _predict(config: RunConfig, nodes: list[int], lengths: list[int], hardware: Hardware, fixed: Fixed) -> list[Point]:
    wanted = [{"nodes": count, "sequence_length": length} for count in nodes for length in lengths]
    points = [Point(**one, layouts=best_layouts(config, **one, hardware=hardware, fixed=fixed)) for one in wanted]
    if not any(point.layouts for point in points):
        raise explain_none(config, **wanted[0], hardware=hardware, fixed=fixed)
    return points


def _series(option: str, text: str) -> list[int]:
    """`8`, `1,8,128` or `1..128`, which doubles; K and M are 2^10 and 2^20."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        number, end = _number(option, first), _number(option, last) if dots else _number(option, first)
        if end < number:
            raise UserError(f"{option} {part}: runs backwards; use {last}..{first}")
        while number <= end:
            numbers.append(number)
            number *= 2
    return list(dict.fromkeys(numbers))


def _number(option: str, text: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        like = "8, 1,8,128 or 1..128" if option == "--nodes" else "8192, 8K, 8K,1M or 8K..4M"
        raise UserError(f"{option}: {text!r} is not a number of at least 1; use {like}")
    return int(match[1]) * _UNITS[match[2].lower()]


def _record(config: RunConfig, hardware: Hardware, points: list[Point]) -> dict[str, Any]:
    return {
        "predicted": True,
        "hardware": {
            "name": hardware.name,
            "numbers": {
                name: {"value": value, "meaning": meaning, "source": source}
                for name, value, meaning, source in hardware.assumptions()
            },
        },
        "assumptions": _sentences(config),
        "points": [
            {
                "nodes": point.nodes,
                "gpus": point.nodes * hardware.gpus_per_node,
                "sequence_length": point.sequence_length,
                "layouts": [_layout_record(one) for one in point.layouts[:_SHOWN_LAYOUTS]],
            }
            for point in points
        ],
    }


def _layout_record(one: Prediction) -> dict[str, Any]:
    return {
        "layout": {axis: getattr(one.layout, axis) for axis in AXES},
        "recompute": one.recompute,
        "exchange": one.exchange,
        "global_batch_size": one.global_batch_size,
        "micro_batch_size": one.layout.micro_batch_size,
        "num_microbatches": one.layout.num_microbatches,
        "tokens_per_step": one.tokens_per_step,
        "step_s": one.step_s,
        "tokens_per_s": one.tokens_per_s,
        "tokens_per_s_per_gpu": one.tokens_per_s / one.layout.world_size,
        "mfu": one.mfu,
        "compute_s": one.work.compute_s + one.optimizer_s,
        "exposed_s": one.exposed_s,
        "seconds": {
            **dataclasses.asdict(one.work),
            **{
                name: getattr(one, name) for name in ("bubble_s", "messages_s", "data_s", "data_total_s", "optimizer_s")
            },
        },
        "fits": one.fits,
        "memory": {**dataclasses.asdict(one.memory), "total_bytes": one.memory.total_bytes},
    }


def _sentences(config: RunConfig) -> list[str]:
    batch = (
        f"a step takes the configuration's tokens, {config.tokens_per_step:,}, {BATCH_TOLERANCE:.0%} more or less, or "
        "one sequence if that is longer; the micro-batch is the configuration's"
    )
    return [batch, *step_cost.assumptions(), *(f"memory: {one}" for one in memory.assumptions(config, searched=True))]


def _show(path: str, config: RunConfig, hardware: Hardware, points: list[Point]) -> None:
    # Wider than a pipe's 80 columns, so that no line of numbers is broken.
    console = Console(highlight=False, markup=False, width=max(Console().width, 132))
    console.print(f"{path} on nodes of {hardware.gpus_per_node} {hardware.name}: predicted, not measured\n")
    if len(points) == 1:
        (point,) = points
        console.print(_points_table((point, one) for one in point.layouts[:_SHOWN_LAYOUTS]))
        _show_one(console, path, hardware, point.layouts[0])
    else:
        console.print(_points_table((point, point.layouts[0] if point.layouts else None) for point in points))
    console.print(_hardware_table(hardware))
    console.print("Assumptions:")
    for sentence in _sentences(config):
        console.print(Padding(sentence, (0, 0, 0, 2), expand=False))


def _points_table(rows: Iterable[tuple[Point, Prediction | None]]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption="t·p·s·d: ranks along tensor, pipeline, sequence, data. exposed: share of the step spent waiting "
        "for communication and other stages",
        caption_justify="left",
    )
    left = ("t·p·s·d", "recompute", "exchange")
    for heading in ("nodes", "length", "batch", *left, "GiB", "step s", "tokens/s", "per GPU", "MFU", "exposed"):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for point, one in rows:
        table.add_row(str(point.nodes), _short(point.sequence_length), *(_cells(one) if one else ["", "no layout"]))
    return table


def _cells(one: Prediction) -> list[str]:
    ranks = "·".join(str(getattr(one.layout, axis)) for axis in AXES)
    exchange = one.exchange if one.layout.sequence > 1 else "—"
    head = [f"{one.global_batch_size:,}", ranks, one.recompute, exchange, _gib(one.memory.total_bytes)]
    if not one.fits:
        return [*head, "", "does not fit"]
    return [
        *head,
        f"{one.step_s:.3g}",
        f"{one.tokens_per_s:,.0f}",
        f"{one.tokens_per_s / one.layout.world_size:,.0f}",
        f"{one.mfu:.1%}",
        f"{one.exposed_s / one.step_s:.1%}",
    ]


def _show_one(console: Console, path: str, hardware: Hardware, best: Prediction) -> None:
    console.print(_lines_table(("time of a step, first layout", "seconds", "share", ""), _time_lines(best)))
    usable = f"of {_gib(hardware.usable_bytes)} usable"
    console.print(_lines_table(("memory of a GPU, first layout", "GiB", "", ""), _memory_lines(best, usable)))
    layout = best.layout
    keys = [f"parallel.{axis}={getattr(layout, axis)}" for axis in AXES[:3]]
    keys += [f"parallel.exchange={best.exchange}", f"train.recompute={best.recompute}"]
    keys += [f"data.sequence_length={best.sequence_length}", f"train.global_batch_size={best.global_batch_size}"]
    console.print("Overrides for this layout:")
    # Whole, however long the line is: it is to be pasted.
    console.print(f"  {shlex.join([path, *keys])}\n", soft_wrap=True)


def _time_lines(one: Prediction) -> Iterable[tuple[str, str, str, str]]:
    work = one.work
    seconds = (
        ("matrix products", work.products_s, ""),
        ("mixer operators", work.operators_s, ""),
        ("elementwise work", work.elementwise_s, ""),
        ("recomputation", work.replay_s, ""),
        ("kernel launches", work.launch_s, ""),
        ("optimizer", one.optimizer_s, ""),
        ("tensor: activations", work.tensor_s, f"of {work.tensor_total_s:.4f} s of communication"),
        ("sequence: states, keys and values", work.sequence_s, f"of {work.sequence_total_s:.4f} s"),
        ("pipeline: bubble", one.bubble_s, ""),
        ("pipeline: messages", one.messages_s, ""),
        ("data: gradients and weights", one.data_s, f"of {one.data_total_s:.4f} s"),
        ("total", one.step_s, f"{one.tokens_per_step:,} tokens"),
    )
    for name, value, note in seconds:
        yield name, f"{value:.4f}", f"{value / one.step_s:.1%}", note


def _memory_lines(one: Prediction, usable: str) -> Iterable[tuple[str, str, str, str]]:
    for name in ("weights", "gradients", "optimizer", "activations", "exchange", "logits"):
        yield name, _gib(getattr(one.memory, f"{name}_bytes")), "", ""
    yield "total", _gib(one.memory.total_bytes), "", usable if one.fits else f"{usable}: does not fit"


def _hardware_table(hardware: Hardware) -> Table:
    rows = ((name, f"{value:g}", meaning, source) for name, value, meaning, source in hardware.assumptions())
    return _lines_table(("hardware numbers (change with --set)", "", "", "source"), rows)


def _lines_table(headings: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position == 1 else "left", no_wrap=position < 2)
    for line in lines:
        table.add_row(*line)
    return table


def _short(tokens: int) -> str:
    """8192 -> 8K."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f}"
