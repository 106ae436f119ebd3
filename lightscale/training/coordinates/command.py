"""``lightscale coordinate-check``: whether activations keep their size over widths, at the start and in training."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightscale.config.arguments import add_config, add_overrides, path_argument
from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.models.mup import at_width
from lightscale.models.registry import check_model
from lightscale.output.plot import DOTS_PER_INCH, check_plot_path, new_figure
from lightscale.output.terminal import plain_console, plain_table
from lightscale.training.coordinates.slopes import CHANGE, FAR, LIMIT, SIZE, Slope, largest_change, slopes
from lightscale.training.optimizer.registry import optimizer_spec

EXIT_NOT_FLAT = 1
_WIDTHS = 4
_LEAST_WIDTHS = 2
_MOST_IDS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale coordinate-check``."""
    add_config(parser)
    add_overrides(parser)
    add = parser.add_argument
    widths = "widths of the model, with heads as wide as CONFIG's (default: 1, 2, 4 and 8 times 4 heads)"
    add("--widths", type=int, nargs="+", metavar="D", help=widths)
    add("--steps", type=int, default=6, metavar="N", help="optimizer steps (default: %(default)s)")
    add("--seeds", type=int, default=3, metavar="N", help="models of each width (default: %(default)s)")
    add("--tokens", type=int, default=16, metavar="N", help="tokens per step (default: %(default)s)")
    add("--plot", type=path_argument, metavar="PATH", help="draw sizes over widths (.png, .svg, .pdf)")
    add("--json", action="store_true", help="print one JSON object: sizes and exponents of all activations and steps")


def run(args: argparse.Namespace) -> int:
    """Measure, print the exponents, and judge: 0, or 1 where one is not flat."""
    for name in ("steps", "seeds", "tokens"):
        if (value := getattr(args, name)) < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if args.plot is not None:
        check_plot_path(args.plot)
    config = load(args.config, args.overrides)
    widths = _widths(config, args.widths)
    configs = [_at_width(config, width) for width in widths]
    print("loading PyTorch …", file=sys.stderr, flush=True)
    # By name: it takes seconds, and mistakes are reported before.
    measurement: Any = importlib.import_module("lightscale.training.coordinates.measure")
    how = {"steps": args.steps, "seeds": args.seeds, "tokens": args.tokens, "device": config.train.device}
    measured = []
    for width, one in zip(widths, configs, strict=True):
        print(f"width {width} …", file=sys.stderr, flush=True)
        measured.append(measurement.measure(one, **how))
    found = slopes(widths, measured)
    if args.plot is not None:
        draw(widths, found, args.plot, title(config, args.config))
    _print(widths, found, lr=config.optimizer.lr, as_json=args.json)
    return 0 if all(one.is_flat for one in found if one.is_judged) else EXIT_NOT_FLAT


def title(config: RunConfig, name: object) -> str:
    """That of the picture."""
    mup = config.model.mup
    how = "without model.mup" if mup is None else f"model.mup.base_hidden_size = {mup.base_hidden_size}"
    return f"{name}: {how}, {config.optimizer.name}, lr {config.optimizer.lr:g}"


def _widths(config: RunConfig, given: Sequence[int] | None) -> list[int]:
    model = config.model
    if model.patches is not None or model.head is not None:
        raise UserError(
            "coordinate-check compares models that predict ids: model.patches and model.head are not supported; use a "
            "configuration without them, as widths change the same mixers"
        )
    widths = given or [4 * model.head_dim * 2**power for power in range(_WIDTHS)]
    if len(set(widths)) < _LEAST_WIDTHS or sorted(set(widths)) != widths:
        raise UserError(f"--widths {' '.join(map(str, widths))}: must be {_LEAST_WIDTHS} or more, ascending")
    for width in widths:
        if width < 1 or width % model.head_dim:
            raise UserError(
                f"--widths {width}: must be a multiple of {model.head_dim}, the width of a head (model.hidden_size / "
                "model.num_heads)"
            )
    return widths


def _at_width(config: RunConfig, width: int) -> RunConfig:
    """With the model of this width, on one process; nothing else of the run is used."""
    table = config.model_dump() | {"model": at_width(config.model, width).model_dump()}
    # Rows of ids that no token has would only cost time.
    table["model"]["vocab_size"] = min(_MOST_IDS, config.model.vocab_size)
    table["parallel"] = {}
    table["train"] |= {"init_from": None, "branch_from": None, "cuda_graphs": "off", "recompute": "none"}
    table["train"] |= {"recompute_layers": None}
    found = RunConfig.model_validate(table)
    check_model(found.model, found.parallel)
    # Raises what the optimizer refuses.
    optimizer_spec(found)
    return found


def _print(widths: Sequence[int], found: Sequence[Slope], *, lr: float, as_json: bool) -> None:
    judged = [one for one in found if one.is_judged]
    wrong = [one for one in judged if not one.is_flat]
    if as_json:
        lines = [asdict(one) | {"is_flat": one.is_flat} for one in found]
        print(json.dumps({"widths": widths, "limit": LIMIT, "is_flat": not wrong, "activations": lines}))
        return
    table = plain_table([], ["activation", "", "exponent", *map(str, widths)])
    for one in judged:
        mark = "" if one.is_flat else " !"
        what = SIZE if one.kind == SIZE else f"change, {one.step} steps"
        table.add_row(one.activation, what, f"{one.slope:+.3f}{mark}", *(f"{size:.3g}" for size in one.sizes))
    plain_console().print(table)
    if wrong:
        worst = max(wrong, key=lambda one: abs(one.slope))
        print(
            f"not flat: {len(wrong)} of {len(judged)} exponents exceed {LIMIT}; the worst is {worst.slope:+.3f} of "
            f"{worst.activation} ({worst.kind})"
        )
        activation, factor = largest_change(found)
        if factor > FAR:
            print(
                f"the output of {activation} changes by {factor:.1f} times its size: these steps have no warm-up, and "
                f"optimizer.lr = {lr:g} is too large for a verdict; repeat with optimizer.lr={lr / 2:g} or less"
            )
    else:
        print(f"flat: all {len(judged)} exponents are within {LIMIT} of 0")


def draw(widths: Sequence[int], found: Sequence[Slope], path: Path, title: str) -> None:
    """Write a picture of sizes and changes over widths to ``path``, behind ``check_plot_path``."""
    figure = new_figure(13, 4.8)
    for axes, kind in zip(figure.subplots(1, 2), (SIZE, CHANGE), strict=True):
        shown = [one for one in found if one.kind == kind and (one.is_judged or kind == SIZE)]
        for number, one in enumerate(shown):
            label = f"{one.activation}: {one.slope:+.2f}{'' if one.is_judged else ' (not judged)'}"
            style = "-" if one.is_judged else ":"
            axes.plot(widths, one.sizes, style, marker="o", ms=3, color=f"C{number % 10}", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(widths, labels=list(map(str, widths)))
        axes.set_xlabel("hidden_size")
        steps = max((one.step for one in shown), default=0)
        axes.set_title("size at the start" if kind == SIZE else f"change after {steps} steps", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.axes[0].set_ylabel("root mean square")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=DOTS_PER_INCH)
