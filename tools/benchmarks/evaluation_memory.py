"""Stateful perplexity of one long document: peak memory over its length, which linear mixers keep constant.

Each measurement is a process of its own, which evaluates a short document first: what imports, the model and the first
rows take is in the peak of every length. The model is tiny and the process small, so that what is kept for each token,
its id, its log-probability and whether it is the most probable one, shows: a few bytes.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from lightscale.config.files import load
from lightscale.evaluation.inference.requests import RollingLogLikelihood, TokenLikelihoods
from lightscale.evaluation.inference.scoring import Scorer, ScoringSettings
from lightscale.models.language_model import LanguageModel
from lightscale.parallel.mesh import start_mesh
from lightscale.training.build import build_engine

SHORT, LONG = 2**16, 2**20
MOST_RATIO = 1.05
MIXERS = ("tnl", "hgrn2", "cosformer2", "lightnet")
_FIRST_TOKENS = 2**14
# What is freed goes back at once: memory is what is in use.
_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
# From <linux/prctl.h>.
_PR_SET_THP_DISABLE = 41


def run(mixers: Sequence[str], *, row_tokens: int) -> Iterator[dict[str, Any]]:
    """Peaks at both lengths, their ratio, and whether it is what it should be, of one mixer more each time."""
    figures: dict[str, Any] = {}
    for mixer in mixers:
        short, long = (_measure(mixer, tokens, row_tokens) for tokens in (SHORT, LONG))
        ratio = long["peak_bytes"] / short["peak_bytes"]
        figures[mixer] = {"64K": short, "1M": long, "ratio": ratio, "is_constant": ratio <= MOST_RATIO}
        yield figures


def _measure(mixer: str, tokens: int, row_tokens: int) -> dict[str, float]:
    words = [sys.executable, __file__, mixer, str(tokens), str(row_tokens), str(LONG // tokens)]
    environment = {**os.environ, **_ALLOCATOR}
    output = subprocess.run(
        words, capture_output=True, text=True, check=True, env=environment, preexec_fn=_without_huge_pages
    ).stdout
    peak_bytes, seconds = output.split()[-2:]
    return {"peak_bytes": int(peak_bytes), "tokens_per_s": tokens / float(seconds)}


def _without_huge_pages() -> None:
    """The kernel would join pages of a process that lasts, and count what it never touched."""
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


def table(figures: dict[str, Any]) -> Table:
    """For people."""
    found = Table("mixer")
    for heading in ("peak at 64K tokens, MB", "at 1M tokens, MB", "ratio", "tokens/s at 1M", "constant"):
        found.add_column(heading, justify="right")
    for mixer, of in figures.items():
        peaks = (f"{of[length]['peak_bytes'] / 1e6:,.0f}" for length in ("64K", "1M"))
        is_constant = "yes" if of["is_constant"] else "no"
        found.add_row(mixer, *peaks, f"{of['ratio']:.3f}", f"{of['1M']['tokens_per_s']:,.0f}", is_constant)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured."""
    parser.add_argument(
        "--mixers", nargs="+", default=list(MIXERS), help=("mixers to measure (default: all linear mixers)")
    )
    parser.add_argument("--row-tokens", type=int, default=8192, help="tokens processed at once (default: 8192)")


def _evaluate(mixer: str, tokens: int, row_tokens: int, repeats: int) -> None:
    """The process of one measurement: prints its peak in bytes, and the seconds that a document took."""
    config = load(f"configs/{mixer}-tiny.toml", ["train.device=cpu", "model.vocab_size=4096"])
    ids = np.random.default_rng(0).integers(1, config.model.vocab_size, tokens + 1, dtype=np.int32)
    with (
        tempfile.TemporaryDirectory(prefix="bench-evaluation-") as folder,
        start_mesh(device="cpu", init_method=f"file://{folder}/rendezvous") as mesh,
    ):
        model = build_engine(config, mesh, vocab_size=config.model.vocab_size, trainable=False).module
        assert isinstance(model, LanguageModel)
        scorer = Scorer(model, mesh, settings=ScoringSettings(row_tokens=row_tokens))
        scorer.answer([RollingLogLikelihood(ids=ids[: _FIRST_TOKENS + 1])])
        sampler = _Peak()
        began_s = time.perf_counter()
        # The same tokens in all at every length, one document after another: what is looked at now and then finds a
        # short peak the more probably, the more often there is one.
        for _ in range(repeats):
            (answer,) = scorer.answer([RollingLogLikelihood(ids=ids)])
        seconds = (time.perf_counter() - began_s) / repeats
        peak_bytes = sampler.end()
    assert isinstance(answer, TokenLikelihoods)
    assert len(answer.log_probability) == tokens and np.isfinite(answer.log_probability).all()
    print(peak_bytes, seconds)


class _Peak:
    """The largest anonymous memory of this process while it lasts, looked at every few milliseconds.

    The kernel's own record of a peak counts pages of libraries too, which it drops and reads again as it likes.
    """

    def __init__(self) -> None:
        self._largest, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> int:
        """In bytes."""
        self._ended.set()
        self._thread.join()
        return self._largest

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            sizes = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "VmSwap:"))]
            self._largest = max(self._largest, 1024 * sum(sizes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    _evaluate(sys.argv[1], *map(int, sys.argv[2:]))
