"""The computing twin beside the CPU path: the same ranks through both, and how far apart they are."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cuda_twin.installation import Twin
from lightscale.errors import UserError

Ranks = list[dict[str, Any]]


def run(
    twin: Twin, cases: Sequence[Mapping[str, Any]], *, ranks: int, on_gpus: bool, interpreted: bool = False
) -> list[Ranks]:
    """What each rank finds of each of ``cases``, the fields of a ``ComputingCase``: on a GPU of its own, or on CPUs.

    ``interpreted``: Triton's kernels are, which is decided when they are imported.

    Raises:
        UserError: a rank failed; it has said why.
    """
    with tempfile.TemporaryDirectory(prefix="computing-") as folder:
        given, found = Path(folder) / "cases.json", Path(folder) / "found"
        meetings = [str(Path(folder) / f"meeting.{number}") for number in range(len(cases))]
        fields = [{**case, "world_size": ranks, "meeting": at} for case, at in zip(cases, meetings, strict=True)]
        given.write_text(json.dumps(fields), encoding="utf-8")
        environment = twin.environment(devices=ranks if on_gpus else 0, computes=on_gpus)
        # Sums of several threads are not always the same ones.
        environment["OMP_NUM_THREADS"] = "1"
        if interpreted:
            environment["TRITON_INTERPRET"] = "1"
        command = [sys.executable, "-m", "cuda_twin.computing_run", str(given), str(found)]
        outputs = [Path(folder) / f"output.{rank}" for rank in range(ranks)]
        processes = [_start(command, {**environment, "RANK": str(rank)}, outputs[rank]) for rank in range(ranks)]
        try:
            codes = [process.wait(timeout=3000) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            texts = [output.read_text(errors="replace")[-20000:] for output in outputs]
            raise UserError(f"ranks ended with {codes}:\n" + "\n".join(texts))
        return [
            [torch.load(f"{found}.{number}.{rank}", weights_only=True) for rank in range(ranks)]
            for number in range(len(cases))
        ]


def _start(command: list[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def differences(ranks: Ranks, expected: Ranks) -> dict[str, float]:
    """The largest of all ranks: of the loss, absolute; of a norm, a gradient, a weight, relative (RMSE).

    ``gradients`` are those of the first step, of equal weights. Adam makes steps of one size out of gradients of any:
    where one is all rounding, so is the step, and with it what follows (``later_gradients``, ``weights``).
    """
    found = dict.fromkeys(("loss", "norm", "gradients", "later_gradients", "weights"), 0.0)
    for one, other in zip(ranks, expected, strict=True):
        for number, (mine, theirs) in enumerate(zip(one["steps"], other["steps"], strict=True)):
            found["loss"] = max(found["loss"], abs(mine["loss"] - theirs["loss"]))
            found["norm"] = max(found["norm"], abs(mine["norm"] / theirs["norm"] - 1))
            for kind in ("gradients", "weights"):
                assert mine[kind].keys() == theirs[kind].keys()
                pairs = [(mine[kind][name], theirs[kind][name]) for name in mine[kind]]
                into = "later_gradients" if kind == "gradients" and number else kind
                found[into] = max([found[into], *_errors(pairs)])
    return found


def _errors(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterable[float]:
    for found, expected in pairs:
        size = float(expected.double().norm())
        difference = float((found.double() - expected.double()).norm())
        # What is exactly zero must be so on both sides.
        yield difference / size if size else difference
