"""Sequence parallelism on CPUs: what ranks send, held to the formulas, and how long they wait for it.

``run`` starts processes that pass states by gloo, one per sequence rank. Every mixer works on its rank's segment of
some rows, forward and backward, with every way to exchange states in turns. What ``StateExchange`` counts must be
exactly what ``lightscale.planning.exchange_sizes`` says, at every length; a difference is an error. Waiting is the time
between asking for the states and having them; the exchange runs beside the computation, on a thread. Where there are
more processes than cores, waiting is also waiting for a core.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.table import Table
from torch import Tensor, nn

from lightscale.config.mixers import MIXERS, mixer_options_type
from lightscale.config.model import ModelConfig
from lightscale.models.classes import mixer_class, shared_parts
from lightscale.models.language_model import transformer_config
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.shared_parts import StagePart
from lightscale.models.layers.tpe import TPE
from lightscale.models.registry import mixer_spec
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.parallel.sequence import Gather, KeyGather, Ring, StateExchange, TwoLevel
from lightscale.planning.communication import EXCHANGES, Exchange
from lightscale.planning.exchange_sizes import contribution
from lightscale.planning.workload import Workload

KINDS = (*MIXERS, "tpe")
_FP32_BYTES = 4
# The first layer of some mixers is wider: the second is measured.
_LAYERS, _LAYER = 2, 1
_TIMEOUT_S = 100.0


@dataclass(frozen=True, kw_only=True)
class SequenceSettings:
    """What is measured, the same on every rank."""

    kinds: tuple[str, ...] = KINDS
    ranks: tuple[int, ...] = (1, 2, 4)
    tokens: tuple[int, ...] = (512, 2048)
    """Lengths of a rank's segment."""
    rows: int = 2
    heads: int = 4
    width: int = 32
    """Of a head."""
    ranks_per_node: int = 2
    """As two_level sees them."""
    repeats: int = 5

    def model(self, kind: str) -> ModelConfig:
        """A model whose layers are of ``kind``, without convolutions, whose tokens travel apart.

        The positional encoding comes with LightNet.
        """
        mixer = "lightnet" if kind == "tpe" else kind
        options: dict[str, Any] = {}
        if "short_convolution" in getattr(mixer_options_type(mixer), "model_fields", {}):
            options[mixer] = {"short_convolution": 0}
        return ModelConfig(
            mixer=mixer,
            mixer_options=options,
            num_layers=_LAYERS,
            hidden_size=self.heads * self.width,
            num_heads=self.heads,
            intermediate_size=2 * self.heads * self.width,
            vocab_size=64,
        )


def run(settings: SequenceSettings | None = None) -> dict[str, Any]:
    """``{"settings": …, "cases": […]}``, a case for every kind, length, number of ranks and way to exchange.

    Raises RuntimeError where a rank did not send what the formula says, and what failed in a rank.
    """
    settings = settings or SequenceSettings()
    cases = [case for ranks in settings.ranks for case in _on_ranks(settings, ranks)]
    for case in cases:
        check(case)
    return {"settings": dataclasses.asdict(settings), "cases": cases}


def check(case: dict[str, Any]) -> None:
    """RuntimeError unless every rank sent what it should have."""
    for direction in ("forward", "backward"):
        sent, expected = case[direction]["sent"], case[direction]["expected"]
        if sent != expected:
            where = f"{case['kind']} by {case['exchange']} on {case['ranks']} ranks with {case['tokens']} tokens each"
            raise RuntimeError(f"{where}, {direction}: every rank's calls and bytes are {sent}, should be {expected}")


def _on_ranks(settings: SequenceSettings, ranks: int) -> list[dict[str, Any]]:
    """All cases of one number of processes, what the ranks found put together."""
    with tempfile.TemporaryDirectory(prefix="bench-sequence-") as folder:
        started = mp.spawn(_rank, args=(ranks, folder, settings), nprocs=ranks, join=False)
        try:
            while not started.join():
                pass
        finally:
            # Whoever interrupts this leaves no rank behind.
            for process in started.processes:
                process.kill()
        found = [torch.load(Path(folder) / f"rank-{rank}") for rank in range(ranks)]
    return [_merged(settings, ranks, list(of_ranks)) for of_ranks in zip(*found, strict=True)]


def _merged(settings: SequenceSettings, ranks: int, of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    kind, exchange, tokens = (of_ranks[0][name] for name in ("kind", "exchange", "tokens"))
    case: dict[str, Any] = {"kind": kind, "exchange": exchange, "ranks": ranks, "tokens": tokens}
    for direction in ("forward", "backward"):
        case[direction] = {
            "sent": [one[direction] for one in of_ranks],
            "expected": [_expected(settings, kind, exchange, tokens, rank, ranks)[direction] for rank in range(ranks)],
        }
    for name in ("compute_s", "exchange_s", "waited_s"):
        case[name] = max(statistics.median(one[name]) for one in of_ranks)
    # The ratio is taken within each turn, and that of the rank that waits most is reported.
    case["waited_to_compute"] = max(
        statistics.median(w / c for w, c in zip(one["waited_s"], one["compute_s"], strict=True)) for one in of_ranks
    )
    return case


def _expected(
    settings: SequenceSettings, kind: str, exchange: str, tokens: int, rank: int, ranks: int
) -> dict[str, Any]:
    """[calls, bytes] of one rank, by formula."""
    nothing = [0, 0]
    if ranks == 1:
        return {"forward": nothing, "backward": nothing}
    work = Workload(settings.model(kind), tokens * ranks)
    layer = work.layers[_LAYER]
    row_bytes = _FP32_BYTES * settings.rows
    if kind != "tpe" and not layer.has_state:
        # Keys and values of the segment; their gradients for every rank's segment.
        keys = row_bytes * 2 * tokens * settings.heads * settings.width
        return {"forward": [1, keys], "backward": [1, keys * ranks]}
    summary = work.embedding_part_summaries(1)["tpe"] if kind == "tpe" else work.summary(layer, 1)
    sent = contribution(cast(Exchange, exchange), summary, min(settings.ranks_per_node, ranks))
    forward, backward = [sent.num_calls, row_bytes * sent.forward], [sent.num_calls, row_bytes * sent.backward]
    if exchange == "ring" and summary.directions == 2:
        # Half of it to each neighbour, and the first and the last rank have one; backward likewise.
        neighbours = (rank > 0) + (rank < ranks - 1)
        return {
            name: [calls * neighbours // 2, size * neighbours // 2]
            for name, (calls, size) in (("forward", forward), ("backward", backward))
        }
    if exchange == "ring":
        # The last rank has nobody to send to, the first nobody backward.
        return {"forward": forward if rank < ranks - 1 else nothing, "backward": backward if rank > 0 else nothing}
    return {"forward": forward, "backward": backward}


class Stopwatch:
    """The time that an exchange takes, and the time that is waited for it."""

    def __init__(self) -> None:
        self.exchange_s = self.waited_s = 0.0

    @contextmanager
    def on(self, exchange: StateExchange | None) -> Iterator[None]:
        """Measure what is submitted to ``exchange`` meanwhile."""
        if exchange is None:
            yield
            return
        submit = exchange.submit

        def timed(work: Callable[..., Any], *args: Any) -> Callable[[], Any]:
            def timed_work(*tensors: Any) -> Any:
                begin = time.perf_counter()
                result = work(*tensors)
                self.exchange_s += time.perf_counter() - begin
                return result

            wait = submit(timed_work, *args)

            def timed_wait() -> Any:
                begin = time.perf_counter()
                result = wait()
                self.waited_s += time.perf_counter() - begin
                return result

            return timed_wait

        exchange.submit = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            exchange.submit = submit  # type: ignore[method-assign]


def _rank(rank: int, ranks: int, folder: str, settings: SequenceSettings) -> None:
    """What each process does: all cases in one order, the ways to exchange in turns."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    found: list[dict[str, Any]] = []
    store = f"file://{folder}/store"
    with start_mesh(
        device="cpu", rank=rank, world_size=ranks, init_method=store, sequence=ranks, timeout_s=_TIMEOUT_S
    ) as mesh:
        exchanges = _exchanges(mesh, settings.ranks_per_node)
        for kind in settings.kinds:
            # Softmax has no state, and gathers its keys and values in one way.
            ways = exchanges if mixer_has_state(settings, kind) else dict(list(exchanges.items())[:1])
            operator = _operator(settings, kind, mesh)
            for tokens in settings.tokens:
                found += _in_turns(settings, kind, tokens, operator, ways, mesh)
    torch.save(found, Path(folder) / f"rank-{rank}")


def mixer_has_state(settings: SequenceSettings, kind: str) -> bool:
    """Whether ``kind`` exchanges states, and not keys and values."""
    return kind == "tpe" or any(mixer_spec(kind).exchange_values(settings.model(kind), _LAYER))


def _exchanges(mesh: Mesh, ranks_per_node: int) -> dict[str, StateExchange | None]:
    """By name; every rank makes every group."""
    if mesh.sequence == 1:
        return {"none": None}
    ranks, per_node = mesh.sequence, min(ranks_per_node, mesh.sequence)
    assert ranks % per_node == 0, f"{ranks} ranks do not fill nodes of {per_node}"
    local_ranks = range(per_node)
    nodes = [dist.new_group([first + local_rank for local_rank in local_ranks]) for first in range(0, ranks, per_node)]
    across = [dist.new_group(list(range(local_rank, ranks, per_node))) for local_rank in local_ranks]
    group = dist.new_group(list(range(ranks)))
    own = {"node": nodes[mesh.sequence_rank // per_node], "across": across[mesh.sequence_rank % per_node]}
    made = {"gather": Gather(group), "two_level": TwoLevel(group, **own), "ring": Ring(group)}
    return {name: made[name] for name in EXCHANGES}


def _operator(settings: SequenceSettings, kind: str, mesh: Mesh) -> Callable[[Tensor, StateExchange | None], Tensor]:
    """x (n, b, d) and an exchange to the layer's output, in fp32."""
    model = settings.model(kind)
    config = transformer_config(model, mesh, torch.float32)
    module: nn.Module
    parts: list[StagePart] = []
    if kind == "tpe":
        module = TPE(config, model, mesh.groups, stage=0)
    else:
        module = mixer_class(kind)(config, _LAYER + 1, model, mesh.groups)
        shared = [part for part in shared_parts(model) if issubclass(part, StagePart)]
        parts = [part(config, model, mesh.groups, stage=0) for part in shared]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in [parameter for one in (module, *parts) for parameter in one.parameters()]:
            parameter.draw_weights(parameter, generator)

    def apply(x: Tensor, exchange: StateExchange | None) -> Tensor:
        first = mesh.sequence_rank * x.size(0)
        positions = (first + torch.arange(x.size(0))).repeat(x.size(1), 1)
        across = None if exchange is None else KeyGather(exchange)
        context = SequenceContext.of(positions, exchange=exchange, across=across)
        with torch.no_grad():
            given = {part.spec.name: part(context) for part in parts}
        context = dataclasses.replace(context, shared=given)
        output = module(x, context) if kind == "tpe" else module.mix(x, context)
        return cast(Tensor, output)

    return apply


def _in_turns(
    settings: SequenceSettings,
    kind: str,
    tokens: int,
    operator: Callable[[Tensor, StateExchange | None], Tensor],
    exchanges: dict[str, StateExchange | None],
    mesh: Mesh,
) -> list[dict[str, Any]]:
    """Forward and backward by every exchange, in turns, after one round that only counts what is sent."""
    cases: dict[str, dict[str, Any]] = {}
    x = torch.randn(tokens, settings.rows, settings.heads * settings.width, requires_grad=True)
    upstream = torch.randn_like(x)
    for repeat in range(settings.repeats + 1):
        for name, exchange in exchanges.items():
            dist.barrier(group=mesh.control)
            watch = Stopwatch()
            begin = time.perf_counter()
            with watch.on(exchange):
                before = _counted(exchange)
                output = operator(x, exchange)
                between = _counted(exchange)
                output.backward(upstream)
                after = _counted(exchange)
            elapsed_s = time.perf_counter() - begin
            x.grad = None
            if repeat == 0:
                cases[name] = {"kind": kind, "exchange": name, "tokens": tokens}
                cases[name] |= {"forward": _difference(before, between), "backward": _difference(between, after)}
                cases[name] |= {"compute_s": [], "exchange_s": [], "waited_s": []}
                continue
            cases[name]["compute_s"].append(elapsed_s - watch.waited_s)
            cases[name]["exchange_s"].append(watch.exchange_s)
            cases[name]["waited_s"].append(watch.waited_s)
    return list(cases.values())


def _counted(exchange: StateExchange | None) -> list[int]:
    return [0, 0] if exchange is None else [exchange.num_calls, exchange.payload_bytes]


def _difference(before: list[int], after: list[int]) -> list[int]:
    return [later - earlier for earlier, later in zip(before, after, strict=True)]


def table(found: dict[str, Any]) -> Table:
    """One line for each case, of the rank that sends and waits most."""
    lines = Table(
        title="a layer, forward and backward: calls and bytes of a rank as by the formulas; times of the slowest rank",
        caption="waited ÷ compute: time for which the states were waited for; the exchange runs beside the computation",
    )
    for heading in ("ranks", "mixer", "tokens", "exchange"):
        lines.add_column(heading)
    for heading in ("calls", "bytes forward", "backward", "compute ms", "exchange ms", "waited ÷ compute"):
        lines.add_column(heading, justify="right")
    for case in found["cases"]:
        forward, backward = (max(case[direction]["sent"]) for direction in ("forward", "backward"))
        lines.add_row(
            str(case["ranks"]),
            case["kind"],
            str(case["tokens"]),
            case["exchange"],
            f"{forward[0]} + {backward[0]}",
            f"{forward[1]:,}",
            f"{backward[1]:,}",
            f"{case['compute_s'] * 1e3:.1f}",
            f"{case['exchange_s'] * 1e3:.1f}",
            f"{case['waited_to_compute']:.2f}",
        )
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The processes, and the shape of the layer."""
    default = SequenceSettings()
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="mixers (default: all)")
    for name, text in (("ranks", "numbers of processes"), ("tokens", "tokens of a rank's segment")):
        values = list(getattr(default, name))
        shown = " ".join(map(str, values))
        parser.add_argument(f"--{name}", type=int, nargs="+", default=values, help=f"{text} (default {shown})")
    for name, text in (("rows", "rows"), ("heads", "heads"), ("width", "width of a head")):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=default.ranks_per_node,
        help="ranks that share a node, for two_level (default 2)",
    )


def settings_of(args: argparse.Namespace) -> SequenceSettings:
    """The settings on a command line with ``add_arguments`` and ``--repeats``."""
    names = [field.name for field in dataclasses.fields(SequenceSettings)]
    given: dict[str, Sequence[Any] | int] = {name: getattr(args, name) for name in names}
    for ranks in args.ranks:
        if ranks % min(ranks, args.ranks_per_node):
            raise SystemExit(f"--ranks {ranks}: not a multiple of --ranks-per-node {args.ranks_per_node}")
    return SequenceSettings(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})  # type: ignore[arg-type]
