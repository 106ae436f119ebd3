"""Random models on random layouts, each beside one process: losses, gradients, weights, resumption, export.

    python tools/fuzz_layouts.py --cases 100 --seed 7
    python tools/fuzz_layouts.py --cases 24 --mixer kimi-delta tnl            # only models with one of these mixers
    python tools/fuzz_layouts.py --case '{"world_size": 2, "keys": {…}}'      # one again, as a failure prints it
    python tools/fuzz_layouts.py --uncovered benchmarks/fuzz-layouts          # towards pairs that no kept case covers
    python tools/fuzz_layouts.py --table benchmarks/fuzz-layouts              # which pairs the kept cases cover

A case is a configuration drawn from the schema (``layout_fuzzing/drawing.py``) that validation takes, and a layout of 2
to 4 ranks. In fp64 three steps of gradients and plain descent are compared with one process: loss, all gradients,
weights, and the parameters that ``lightscale plan`` counts. In fp32 three steps of the optimizer leave copies equal and
hold the bytes of the plan; one process, and as many ranks on other axes, resume a checkpoint of them. Of models that
write text, prompts in pieces, token by token, and by the export's plain form have the logits of the whole; an import of
that form has the weights. A failing case is shrunk, option by option and rank by rank.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from layout_fuzzing.configuration import draw_valid, refusal
from layout_fuzzing.covering import Coverage
from layout_fuzzing.drawing import Drawer, Drawn
from layout_fuzzing.kept import read_case, read_cases
from layout_fuzzing.pool import RankError, RankPool
from layout_fuzzing.running import FP32_LIMIT, FP64_LIMIT, Job
from layout_fuzzing.stores import write_stores
from lightscale.config.mixers import MIXERS
from lightscale.config.model import ModelConfig

_LIMITS = {
    "reference": FP64_LIMIT,
    "compare": FP64_LIMIT,
    "optimize": FP32_LIMIT,
    "resume": FP32_LIMIT,
    "move": FP32_LIMIT,
    "follow": FP64_LIMIT,
}
"""Of errors, by the jobs in their order."""
_FP8_LIMITS = dict.fromkeys(_LIMITS, 5e-2) | {"follow": FP64_LIMIT}
"""With train.fp8, where a number that another order of a sum puts on the other side of a half is rounded otherwise."""


def limits_of(drawn: Drawn) -> dict[str, float]:
    """Of the errors of a case."""
    return _FP8_LIMITS if drawn.keys.get("train.fp8", "none") != "none" else _LIMITS


def failures(pool: RankPool, drawn: Drawn, stores: str) -> list[str]:
    """What is wrong in a case, a line each; none where all is well."""
    found = []
    with tempfile.TemporaryDirectory(prefix="fuzz-case-") as scratch:
        for what, limit in limits_of(drawn).items():
            case = moved(drawn, stores) if what == "move" else drawn
            if case is None:
                continue
            ranks = case.world_size if what in ("compare", "optimize", "move") else 1
            try:
                of_ranks = pool.run(ranks, Job(drawn=case, stores=stores, scratch=scratch, what=what))
            except RankError as error:
                found.append(f"{what}: {error}")
                # What follows needs what this one leaves.
                if what in ("reference", "optimize"):
                    break
                continue
            found += [
                f"{what}: {name} is off by {error:.2g} on rank {rank}"
                for rank, errors in enumerate(of_ranks)
                for name, error in errors.items()
                if not error <= limit
            ]
    return found


def moved(drawn: Drawn, stores: str) -> Drawn | None:
    """The same model on as many ranks along other axes; None where it takes no other layout."""
    axes = {axis: ranks for axis, ranks in drawn.axes().items() if axis != "data"}
    others = [dict(zip(axes, order, strict=True)) for order in itertools.permutations(axes.values())]
    # Axes that are not used at all: to data ranks.
    others.append(dict.fromkeys(axes, 1))
    for other in others:
        if other == axes:
            continue
        rest = {key: value for key, value in drawn.keys.items() if not key.startswith("parallel.")}
        case = replace(drawn, keys=rest | {f"parallel.{axis}": ranks for axis, ranks in other.items()}, cuts=None)
        if refusal(case, stores) is None:
            return case
    return None


def shrunk(pool: RankPool, drawn: Drawn, stores: str, kind: str) -> Drawn:
    """The case with as few options and ranks as still fail with ``kind``, the job that failed."""

    def fails(one: Drawn) -> bool:
        return refusal(one, stores) is None and any(line.startswith(kind) for line in failures(pool, one, stores))

    changed = True
    while changed:
        changed = False
        for smaller in _smaller(drawn):
            if fails(smaller):
                drawn, changed = smaller, True
                break
    return drawn


def _smaller(drawn: Drawn) -> Iterator[Drawn]:
    if drawn.cuts is not None:
        yield replace(drawn, cuts=None)
    for axis in ("tensor", "pipeline", "sequence"):
        if (ranks := drawn.axes()[axis]) > 1:
            keys = drawn.keys | {f"parallel.{axis}": 1}
            cuts = None if axis == "sequence" else drawn.cuts
            yield Drawn(world_size=drawn.world_size // ranks, keys=keys, cuts=cuts)
    if (ranks := drawn.axes()["data"]) > 1:
        yield replace(drawn, world_size=drawn.world_size // ranks)
    if isinstance(mixers := drawn.keys["model.mixer"], list) and len(mixers) > 1:
        for name in mixers:
            keys = {k: v for k, v in drawn.keys.items() if ".mixer_options." not in k or f".{name}." in k}
            yield replace(drawn, keys=keys | {"model.mixer": name})
    needed = {"task.name", "model.mixer", "model.head.num_labels", "data.packing"}
    for key in drawn.keys.keys() - needed:
        # What has no default stays.
        if key.startswith("parallel.") or (key.startswith("model.") and key.count(".") == 1 and _is_required(key)):
            continue
        yield replace(drawn, keys={k: v for k, v in drawn.keys.items() if k != key})


def _is_required(key: str) -> bool:
    return ModelConfig.model_fields[key.rpartition(".")[2]].is_required()


def command(drawn: Drawn) -> str:
    """What runs the case again."""
    return f"python tools/fuzz_layouts.py --case '{json.dumps(asdict(drawn))}'"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60, help="number of cases (default: 60)")
    parser.add_argument("--seed", type=int, help="random seed (default: a new one each time, printed)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--mixer", nargs="+", choices=MIXERS, default=[], help="only models with one of these mixers (default: any)"
    )
    which.add_argument(
        "--uncovered",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="begin every case from a pair that the cases of these files and folders do not cover",
    )
    which.add_argument("--case", help="one case, as JSON")
    which.add_argument(
        "--table",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="print the table of pairs of such files and folders, and exit",
    )
    parser.add_argument("--out", type=Path, help="append each case and its failures to this file, JSON lines")
    parser.add_argument("--shrink", action="store_true", help="also shrink the case of --case")
    parser.add_argument("--keep-going", action="store_true", help="continue after a failing case")
    parser.add_argument(
        "--timeout-s", type=float, default=90.0, help="seconds after which a job counts as hung (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.table:
        coverage = Coverage(read_cases(args.table))
        coverage.find_refused()
        print(coverage.table())
        return 0
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    wrong, number, began = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-layouts-") as folder, RankPool(4, timeout_s=args.timeout_s) as pool:
        write_stores(Path(folder))
        for number, drawn in enumerate(cases_of(args, random.Random(seed), folder), 1):
            found = failures(pool, drawn, folder)
            if args.out:
                line = {"seed": seed, "number": number - 1, "case": asdict(drawn), "wrong": found}
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if found:
                wrong += 1
                print(f"case {number - 1}: {command(drawn)}\n" + "\n".join(found), flush=True)
                if args.case is None or args.shrink:
                    small = shrunk(pool, drawn, folder, found[0].partition(":")[0])
                    print(f"shrunk: {command(small)}\n" + "\n".join(failures(pool, small, folder)), flush=True)
                    if not args.keep_going:
                        return 1
            elif number % 10 == 0:
                print(f"{number} cases, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{number} cases, {wrong} wrong")
    return 1 if wrong else 0


def cases_of(args: argparse.Namespace, rng: random.Random, stores: str) -> Iterator[Drawn]:
    """The cases that the command line asks for."""
    if args.case is not None:
        return iter([read_case(args.case)])
    if args.uncovered:
        # Stacks of many mixers, so that few cases have many pairs; their options are filled in.
        drawer = Drawer(rng, periods=(2, 4), share=0.1)
        drawn = Coverage(read_cases(args.uncovered), stores).towards_uncovered(drawer)
    else:
        drawer = Drawer(rng)
        drawn = (draw_valid(drawer, stores, frozenset(args.mixer)) for _ in itertools.count())
    return itertools.islice(drawn, args.cases)


if __name__ == "__main__":
    sys.exit(main())
