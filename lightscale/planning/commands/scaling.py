"""``lightscale plan CONFIG --nodes …``: predict speed and memory by number of nodes and sequence length.

It prints the commands that train on the best layout, one line each, to paste.
"""

import argparse
import dataclasses
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from lightscale.config.files import load
from lightscale.config.schedulers import default_scheduler
from lightscale.config.schema import RunConfig
from lightscale.config.section import MOST_RANKS, MOST_SEQUENCE_TOKENS
from lightscale.errors import UserError, shortened
from lightscale.output.terminal import plain_console
from lightscale.planning import memory, step_cost
from lightscale.planning.advice import attention_reason, changed_batch, layout_overrides
from lightscale.planning.hardware import HARDWARE, Hardware, with_settings
from lightscale.planning.prediction import Prediction
from lightscale.planning.search import AXES, BATCH_TOLERANCE, MOST_NODES, Fixed, best_layouts, explain_none, least_nodes

EXIT_NOTHING_FITS = 1
_SHOWN_LAYOUTS = 5
_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_MOST_NODES = MOST_RANKS // 8
_NUMBER = re.compile(r"([0-9]+)([kKmM]?)")
_OPTIONS = ("length", "layout", "hardware", "settings")


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Commands that train on a layout."""

    overrides: tuple[str, ...]
    """The given overrides, then those of the layout."""
    train: str
    """`lightscale train` on one line; several nodes need a job that has them."""
    submit: str
    """`lightscale submit` on one line."""
    changed_batch: str | None
    """The layout's change of the batch, in words; None: none."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Prediction for one number of nodes and one length."""

    nodes: int
    sequence_length: int
    layouts: list[Prediction]
    """Layouts, best first."""
    commands: Commands | None
    """Commands of the best layout; None: none fits."""
    least_nodes: int | None
    """Least number of nodes on which a layout fits, if none fits here; None: none up to `MOST_NODES`."""

    @property
    def fits(self) -> bool:
        """Whether any layout fits."""
        return bool(self.layouts) and self.layouts[0].fits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the prediction."""
    group = parser.add_argument_group("prediction of speed and memory on nodes of GPUs (not measured)")
    group.add_argument("--nodes", metavar="N", help="numbers of nodes: 8, or 1,8,128, or 1..128 by doubling")
    group.add_argument(
        "--length", metavar="TOKENS", help="sequence lengths: 8K, or 8K,1M, or 8K..4M by doubling (default: CONFIG's)"
    )
    group.add_argument(
        "--layout",
        metavar="AXIS=N,…",
        help="fixed choices, not searched: tensor, pipeline, sequence, data, micro_batch_size, recompute, exchange, "
        "attention",
    )
    group.add_argument("--hardware", choices=HARDWARE, help="kind of GPU (default: h100)")
    group.add_argument(
        "--set", dest="settings", action="append", metavar="NAME=NUMBER", help="override a hardware number"
    )


def refuse_without_nodes(args: argparse.Namespace) -> None:
    """Raise UserError for an option of the prediction without effect."""
    for name in _OPTIONS:
        if getattr(args, name) is not None:
            option = "set" if name == "settings" else name
            raise UserError(f"--{option} requires --nodes, the number of nodes; use --nodes 1 for one")


def run(args: argparse.Namespace) -> int:
    """Print the prediction; returns 1 if no layout fits."""
    if args.processes is not None:
        raise UserError(
            f"--processes {args.processes} and --nodes {args.nodes}: use only one of them; a node has one rank per GPU"
        )
    hardware = with_settings(HARDWARE[args.hardware or "h100"], args.settings or [])
    fixed = Fixed.parse(args.layout or "")
    nodes = _series("--nodes", args.nodes)
    config = load(args.config, args.overrides)
    lengths = _series("--length", args.length) if args.length else [config.data.sequence_length]
    command = _Command(args.config, args.overrides, config, hardware, fixed)
    points = command.points(nodes, lengths)
    if args.json:
        print(json.dumps({"config": str(args.config), **_record(config, hardware, points)}, indent=2))
    else:
        _show(str(args.config), config, hardware, points)
    return 0 if any(point.fits for point in points) else EXIT_NOTHING_FITS


class _Command:
    """What was asked."""

    def __init__(
        self, path: Path, overrides: Sequence[str], config: RunConfig, hardware: Hardware, fixed: Fixed
    ) -> None:
        self.path, self.overrides, self.config = path, overrides, config
        self.hardware, self.fixed = hardware, fixed

    def points(self, nodes: list[int], lengths: list[int]) -> list[Point]:
        """One point for each number of nodes and each length."""
        points = [self._point(count, length) for count in nodes for length in lengths]
        if not any(point.layouts for point in points):
            where = {"nodes": nodes[0], "sequence_length": lengths[0]}
            raise explain_none(self.config, **where, hardware=self.hardware, fixed=self.fixed)
        return points

    def _point(self, nodes: int, length: int) -> Point:
        where: dict[str, Any] = {"sequence_length": length, "hardware": self.hardware, "fixed": self.fixed}
        layouts = best_layouts(self.config, nodes=nodes, **where)
        fits = bool(layouts) and layouts[0].fits
        return Point(
            nodes=nodes,
            sequence_length=length,
            layouts=layouts,
            commands=self._commands(nodes, layouts[0]) if fits else None,
            least_nodes=None if fits or not layouts else least_nodes(self.config, more_than=nodes, **where),
        )

    def _commands(self, nodes: int, best: Prediction) -> Commands:
        chosen = layout_overrides(self.config, best, self.hardware)
        keys = {text.partition("=")[0] for text in chosen}
        given = [text for text in self.overrides if text.partition("=")[0].strip() not in keys]
        words = shlex.join([str(self.path), *given, *chosen])
        gpus = self.hardware.gpus_per_node
        # On several nodes it runs in a job.
        job = f" --scheduler {default_scheduler()}" if nodes > 1 else ""
        return Commands(
            overrides=(*given, *chosen),
            train=f"lightscale train {words} --processes {gpus}{job}",
            submit=f"lightscale submit {words} --nodes {nodes} --gpus-per-node {gpus}",
            changed_batch=changed_batch(self.config, best),
        )


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
    # By its digits first: Python reads no number of thousands of them.
    most = _MOST_NODES if option == "--nodes" else MOST_SEQUENCE_TOKENS
    number = 0 if match is None or len(match[1]) > len(str(most)) else int(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= number <= most:
        like = "8, 1,8,128 or 1..128" if option == "--nodes" else "8192, 8K, 8K,1M or 8K..4M"
        raise UserError(f"{option}: {shortened(text)!r} is not a number of at least 1 and at most {most:_}; use {like}")
    return number


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
                "fits": point.fits,
                "least_nodes": point.least_nodes,
                "attention": attention_reason(point.layouts) if point.layouts else None,
                "commands": None if point.commands is None else dataclasses.asdict(point.commands),
                "layouts": [_layout_record(one) for one in point.layouts[:_SHOWN_LAYOUTS]],
            }
            for point in points
        ],
    }


def _layout_record(one: Prediction) -> dict[str, Any]:
    return {
        "layout": {axis: getattr(one.layout, axis) for axis in AXES},
        "recompute": one.recompute,
        "recompute_layers": one.recompute_layers,
        "exchange": one.exchange,
        "attention": one.attention,
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
    which = "behind the ramp-up a step" if config.train.rampup_batch_size else "a step"
    batch = (
        f"{which} has the configuration's {config.tokens_per_step:,} tokens: exactly at its own length if a fitting "
        f"layout exists, else ±{BATCH_TOLERANCE:.0%}, or one sequence if that is longer; a larger micro-batch is "
        "chosen only if it is faster by more than 1 %"
    )
    return [batch, *step_cost.assumptions(), *(f"memory: {one}" for one in memory.assumptions(config, searched=True))]


def _show(path: str, config: RunConfig, hardware: Hardware, points: list[Point]) -> None:
    # Wider than a pipe's 80 columns, so that no line of numbers is broken.
    console = plain_console(least_width=144)
    console.print(f"{path} on nodes of {hardware.gpus_per_node} {hardware.name}: predicted, not measured\n")
    if len(points) == 1:
        (point,) = points
        console.print(_points_table((point, one) for one in point.layouts[:_SHOWN_LAYOUTS]))
        _show_commands(console, point)
        _show_one(console, hardware, point.layouts[0])
    else:
        console.print(_points_table((point, point.layouts[0] if point.layouts else None) for point in points))
        for point in points:
            if not point.fits:
                console.print(_least_nodes(point), soft_wrap=True)
        console.print("For commands to paste, use one number of nodes and one length.\n", soft_wrap=True)
    for point in points:
        if point.layouts and (reason := attention_reason(point.layouts)):
            console.print(f"{_short(point.sequence_length)} on nodes: {point.nodes}: {reason}", soft_wrap=True)
    console.print(_hardware_table(hardware))
    console.print("Assumptions:")
    for sentence in _sentences(config):
        console.print(Padding(sentence, (0, 0, 0, 2), expand=False))


def _points_table(rows: Iterable[tuple[Point, Prediction | None]]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption="t·p·s·d: ranks along tensor, pipeline, sequence, data. exposed: share of the step spent on waits "
        "for communication and other stages",
        caption_justify="left",
    )
    left = ("t·p·s·d", "recompute", "exchange", "attention")
    for heading in (
        "nodes",
        "length",
        "batch",
        "micro",
        *left,
        "GiB",
        "step s",
        "tokens/s",
        "per GPU",
        "MFU",
        "exposed",
    ):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for point, one in rows:
        table.add_row(str(point.nodes), _short(point.sequence_length), *(_cells(one) if one else ["", "", "no layout"]))
    return table


def _cells(one: Prediction) -> list[str]:
    ranks = "·".join(str(getattr(one.layout, axis)) for axis in AXES)
    exchange = one.exchange if one.layout.sequence > 1 else "—"
    head = [
        f"{one.global_batch_size:,}",
        str(one.layout.micro_batch_size),
        ranks,
        one.recompute if one.recompute_layers is None else f"{one.recompute} ({one.recompute_layers})",
        exchange,
        one.attention if one.layout.sequence > 1 else "—",
        _gib(one.memory.total_bytes),
    ]
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


def _show_commands(console: Console, point: Point) -> None:
    """Each on one line, however narrow the terminal is: `soft_wrap` breaks none."""
    if point.commands is None:
        console.print(f"{_least_nodes(point)}\n", soft_wrap=True)
        return
    if point.commands.changed_batch:
        console.print(f"The batch changes: {point.commands.changed_batch}\n", soft_wrap=True)
    where = "on this machine" if point.nodes == 1 else f"inside a job of {point.nodes} nodes"
    console.print(f"Commands for the first layout, {where}, or as a job (time limit: launch.time or --time):")
    for command in (point.commands.train, point.commands.submit):
        console.print(command, soft_wrap=True)
    console.print()


def _least_nodes(point: Point) -> str:
    where = (
        f"{point.nodes} {'node' if point.nodes == 1 else 'nodes'}, sequences of {_short(point.sequence_length)} tokens"
    )
    if not point.layouts:
        return f"{where}: heads, layers, sequences and the batch do not divide further"
    if point.least_nodes is None:
        return f"{where}: no layout fits on up to {MOST_NODES} nodes"
    return f"{where}: no layout fits; use at least {point.least_nodes} nodes"


def _show_one(console: Console, hardware: Hardware, best: Prediction) -> None:
    console.print(_lines_table(("time of a step, first layout", "seconds", "share", ""), _time_lines(best)))
    usable = f"of {_gib(hardware.usable_bytes)} usable"
    console.print(_lines_table(("memory of a GPU, first layout", "GiB", "", ""), _memory_lines(best, usable)))


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
    if one.memory.teacher_bytes:
        yield "teacher", _gib(one.memory.teacher_bytes), "", ""
    yield "backward pass of a block", _gib(one.memory.block_bytes), "", "or the logits: the larger counts"
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
