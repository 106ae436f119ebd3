"""The null runs that are kept: what a step of each may ask of its device (``budgets.toml``), and their tables."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightscale.config.files import load
from lightscale.planning.advice import layout_overrides
from lightscale.planning.hardware import H100
from lightscale.planning.search import Fixed, best_layouts

ARCHITECTURES = ("tnl", "hgrn2", "lightnet", "cosformer2", "llama")
LINEAR = ARCHITECTURES[:4]
MASKED = ("task.name='masked'", "model.vocab_size=4160")
SMALL = {
    "lion-lit": ("lion-lit-tiny",),
    "lion-retnet": ("lion-retnet-tiny",),
    "lion-s": ("lion-s-tiny",),
    "lion-s, causal": ("lion-s-causal-tiny",),
    "lightnet, both ways": ("lightnet-tiny", "model.mixer_options.lightnet.causal=false", *MASKED),
    "llama, both ways": ("masked-tiny",),
    "causal-rn": ("causal-rn-tiny",),
    "causal-rn, quadratic": ("causal-rn-tiny", "model.mixer_options.causal-rn.form=quadratic"),
    "bi-rn": ("bi-rn-tiny",),
    "bi-rn, quadratic": ("bi-rn-tiny", "model.mixer_options.bi-rn.form=quadratic"),
    "like mamba2": ("mamba2-like-tiny",),
    "like retnet": ("retnet-like-tiny",),
}
"""Mixers that have no models of 1B: the smallest of each, and what makes it one."""
LENGTHS = (1 << 16, 1 << 20)
"""On 8 ranks: from the first on, a segment is long enough for all that is done otherwise on long ones."""
BUDGETS = Path(__file__).resolve().parent / "budgets.toml"
TABLES = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "cuda-twin-tables.md"
WITH_ALL_AXES = "tnl 7B, 4 layers, all axes, rank 519 of 1,024"
"""The run of which the table of streams is."""
BUDGETED = ("launches", "host_waits", "collectives", "copies")
"""What has a budget: numbers that one step of one rank asks for."""


def _case(config: str, *overrides: str, **more: Any) -> dict[str, Any]:
    return {"config": config, "overrides": ["train.micro_batch_size=1", *overrides], "documents": 4, **more}


def quick_cases() -> dict[str, dict[str, Any]]:
    """Some of each kind, for the default tests."""
    chosen = ("tnl 1B, 2 layers", "tnl 1B, 2 layers, sequence 8", "tnl 7B, 4 layers, all axes, rank 519 of 1,024")
    everything = all_cases()
    return {name: everything[name] for name in chosen}


def all_cases() -> dict[str, dict[str, Any]]:
    """By name. Widths are those of the sizes; layers are fewer, since each of them asks for the same."""
    found: dict[str, dict[str, Any]] = {}
    for one in ARCHITECTURES:
        for layers in (2, 4):
            found[f"{one} 1B, {layers} layers"] = _case(f"{one}-1b", f"model.num_layers={layers}", world_size=8, rank=3)
        found[f"{one} 1B, 2 layers, sequence 8"] = _sequence(one)
    # Few ranks have small buckets: that of the positions' weights is not the one of the words.
    found["lightnet 1B, 2 layers, sequence 8 of 8"] = _case(
        "lightnet-1b", "model.num_layers=2", "parallel.sequence=8", world_size=8, rank=3
    )
    found["tnl 1B, 2 layers, sequence 2"] = _sequence("tnl", ranks=2)
    for one in LINEAR:
        found[f"{one} 1B, 2 layers, sequence 64"] = _sequence(one, ranks=64)
    for kind in ("two_level", "ring"):
        found[f"tnl 1B, 2 layers, sequence 8, {kind}"] = _sequence(
            "tnl", f'parallel.exchange="{kind}"', "parallel.ranks_per_node=4"
        )
    for kind in ("selective", "full"):
        found[f"tnl 1B, 2 layers, sequence 8, {kind} recomputation"] = _sequence("tnl", f'train.recompute="{kind}"')
    axes = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=4")
    for rank in (0, 519, 1023):
        found[f"tnl 7B, 4 layers, all axes, rank {rank:,} of 1,024"] = _case(
            "tnl-7b", "model.num_layers=4", *axes, world_size=1024, rank=rank
        )
    for one in ARCHITECTURES[1:]:
        found[f"{one} 7B, 4 layers, all axes, rank 519 of 1,024"] = _case(
            f"{one}-7b", "model.num_layers=4", *axes, world_size=1024, rank=519
        )
    found |= {_long_name(one, length): _long(one, length) for one in ARCHITECTURES for length in LENGTHS}
    hybrid = ("model.num_layers=2", 'model.mixer=["hgrn2", "llama"]')
    found["hybrid 1B, 2 layers, sequence 8"] = _case("hgrn2-1b", *hybrid, "parallel.sequence=8", world_size=64, rank=19)
    mixed = ("model.num_layers=4", 'model.mixer=["hgrn2*3", "llama"]')
    found["hybrid 7B, 4 layers, all axes, rank 519 of 1,024"] = _case(
        "hgrn2-7b", *mixed, *axes, world_size=1024, rank=519
    )
    found["hybrid, all axes, rank 5 of 16"] = _case("hybrid-tiny", *axes, world_size=16, rank=5)
    for name, (config, *overrides) in SMALL.items():
        given = ("model.num_layers=2", "parallel.sequence=2", *overrides)
        found[f"{name}, 2 layers, sequence 2"] = _case(config, *given, world_size=2, rank=1)
    found["tnl tiny, validation, save, resume"] = _case(
        "tnl-tiny",
        "guard.compare_replicas_every=1",
        "metrics.parameter_norms_every=1",
        validate=True,
        save=True,
        steps=4,
    )
    return found


def _sequence(architecture: str, *overrides: str, ranks: int = 8) -> dict[str, Any]:
    given = ("model.num_layers=2", f"parallel.sequence={ranks}", *overrides)
    return _case(f"{architecture}-1b", *given, world_size=64, rank=19)


def _long_name(architecture: str, length: int) -> str:
    return f"{architecture} 1B, 2 layers, {length:,} tokens on 8 ranks"


def _long(architecture: str, length: int, *overrides: str) -> dict[str, Any]:
    given = (f"data.sequence_length={length}", "parallel.sequence=8", 'train.recompute="full"')
    layers = overrides or ("model.num_layers=2",)
    return _case(f"{architecture}-1b", *given, *layers, world_size=8, rank=3)


def _as_planned(config: str, length: int) -> dict[str, Any]:
    """On the layout of a node that ``lightscale plan CONFIG --nodes 1 --length …`` puts first."""
    run = load(config)
    best, *_ = best_layouts(run, nodes=1, sequence_length=length, hardware=H100, fixed=Fixed())
    return _case(config, *layout_overrides(run, best, H100), world_size=best.layout.world_size, rank=3)


def kernel_cases() -> dict[str, dict[str, Any]]:
    """Models whose kernels are compared with their chunked forms: of 1B, on a segment of 1M tokens on 8 ranks."""
    long = ("data.sequence_length=1048576", "parallel.sequence=8")
    found = {f"{one} 1B, kernels compared": _case(f"{one}-1b", *long, kernels_only=True) for one in ARCHITECTURES}
    for name, (config, *overrides) in SMALL.items():
        if name.startswith(("lion", "lightnet")):
            wide = ("model.num_heads=12", "model.hidden_size=1536", "model.intermediate_size=4096")
            sizes = (*wide, "data.sequence_length=131072")
            found[f"{name}, 1B wide, kernels compared"] = _case(config, *sizes, *overrides, kernels_only=True)
    return found


def beside_the_loss(found: Mapping[str, Any]) -> int:
    """Kernels of a step of a null run but those of the loss, which come for every piece of its logits.

    A piece has two kernels and three products. Fills are left out, with which PyTorch's sums begin where they are long.
    """
    step = found["steps"][-1]
    launches: dict[str, int] = step["launches"]
    return launches["launch"] + launches["triton"] + launches["product"] - 5 * num_pieces(found)


def num_pieces(found: Mapping[str, Any]) -> int:
    """Of the loss's logits in a step, all micro-batches together."""
    count: int = found["steps"][-1]["triton"]["_statistics"]
    return count


def planned_cases() -> dict[str, dict[str, Any]]:
    """Models, most of them whole, whose memory is held to ``lightscale plan``."""
    found = {f"{one} 1B": _case(f"{one}-1b", world_size=8, rank=3) for one in ARCHITECTURES}
    for one in ARCHITECTURES:
        found[f"{one} 1B, 1M tokens on 8 ranks, full recomputation"] = _long(one, 1 << 20, 'train.recompute="full"')
        found[f"{one} 1B, 4 layers, 1M tokens on 8 ranks"] = _long(
            one, 1 << 20, "model.num_layers=4", 'train.recompute="none"'
        )
    for one in ("tnl", "llama"):
        # Blocks that are computed again, and behind them some that are not.
        for layers in (4, 5):
            found[f"{one} 1B, 6 layers, of which {layers} recomputed, 1M tokens on 8 ranks"] = _long(
                one, 1 << 20, "model.num_layers=6", f"train.recompute_layers={layers}"
            )
    found["tnl 1B, 1M tokens on 8 ranks, as planned for 8 GPUs"] = _as_planned("tnl-1b", 1 << 20)
    found["tnl 7B, tensor 8"] = _case("tnl-7b", "parallel.tensor=8", world_size=8, rank=3)
    found["tnl 7B, pipeline 4"] = _case(
        "tnl-7b", "parallel.pipeline=4", 'train.recompute="selective"', world_size=32, rank=0, micro_batches=8
    )
    return found


def length_pairs(found: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """For each linear architecture, ``beside_the_loss`` of its case of each of ``LENGTHS``."""
    return {one: tuple(beside_the_loss(found[_long_name(one, length)]) for length in LENGTHS) for one in LINEAR}


def rank_pairs(found: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """For each linear architecture, launches of a step on 8 and on 64 sequence ranks."""
    return {
        one: tuple(found[f"{one} 1B, 2 layers, sequence {n}"]["steps"][-1]["launches_in_all"] for n in (8, 64))
        for one in LINEAR
    }


def asked(found: Mapping[str, Any]) -> dict[str, int]:
    """What the last step of a null run asks for, by the names of ``BUDGETED``."""
    step = found["steps"][-1]
    return {
        "launches": step["launches_in_all"],
        "host_waits": step["host_waits_in_all"],
        "collectives": sum(one["calls"] for one in step["collectives"]),
        "copies": sum(one["count"] for one in step["copies"].values()),
    }


def read_budgets() -> dict[str, dict[str, int]]:
    """By case."""
    return tomllib.loads(BUDGETS.read_text(encoding="utf-8"))


def budgeted_cases() -> dict[str, dict[str, Any]]:
    """All that have a budget."""
    return all_cases() | kernel_cases()


def write_budgets(found: Mapping[str, Mapping[str, Any]]) -> None:
    """The budgets that these runs, by case, just keep; of other cases those that were written before."""
    head = (
        "# What one step of one rank may ask of its device, counted on the null device. A change that asks for more\n"
        "# fails tests/twin; whoever means it writes this file anew: make twin-budgets.\n"
    )
    counts = (read_budgets() if BUDGETS.exists() else {}) | {name: asked(one) for name, one in found.items()}
    tables = [
        "\n".join([f'["{name}"]', *(f"{key} = {count}" for key, count in counts[name].items())])
        for name in budgeted_cases()
        if name in counts
    ]
    BUDGETS.write_text(head + "\n" + "\n\n".join(tables) + "\n", encoding="utf-8")


def write_table(head: str, rows: Sequence[Sequence[str]], order: Iterable[str]) -> None:
    """Put ``rows`` into the table of ``TABLES`` whose first line begins with ``head``, by their first cells.

    Rows of other cases of ``order`` stay as they were.
    """
    lines = TABLES.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(head)) + 2
    last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    written = {line.split(" | ")[0].removeprefix("| "): line for line in lines[first:last]}
    written |= {row[0]: f"| {' | '.join(row)} |" for row in rows}
    lines[first:last] = [written[name] for name in order if name in written]
    TABLES.write_text("\n".join(lines) + "\n", encoding="utf-8")


def exceeded(name: str, found: Mapping[str, Any], budgets: Mapping[str, Mapping[str, int]]) -> Sequence[str]:
    """In which ways a run asks for more than its budget."""
    return [
        f"{name}: {count:,} {key.replace('_', ' ')} in a step, of which its budget has {budgets[name][key]:,}"
        for key, count in asked(found).items()
        if count > budgets[name][key]
    ]
