"""Studies in little, for tests: definitions, a store, and runs that nobody trained."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from lightscale.data_pipeline.store.token_store import StoreWriter
from lightscale.runs.run_directory import LineWriter
from lightscale.study.cells import Cell
from lightscale.study.study import Study

VOCABULARY = 64
BASE = """
[base]
data.store = "store"
data.sequence_length = 32
model.vocab_size = 64
optimizer = { lr = 3e-3, schedule = "constant", warmup_steps = 2 }
train = { steps = 40, global_batch_size = 4, micro_batch_size = 4 }
"""
SMALL = BASE.replace(
    "model.vocab_size = 64",
    "\n".join(
        f"model.{key} = {value}"
        for key, value in {
            "mixer": '"tnl"',
            "num_layers": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 32,
            "vocab_size": 64,
        }.items()
    ),
)
TINY = """
[axes.architecture.tnl]
extends = "arch/tnl"
[axes.architecture.llama]
extends = "arch/llama"
[axes.size.small]
model = { num_layers = 1, hidden_size = 16, num_heads = 2, intermediate_size = 32 }
[axes.size.medium]
model = { num_layers = 2, hidden_size = 32, num_heads = 2, intermediate_size = 64 }
[axes.size.large]
model = { num_layers = 2, hidden_size = 64, num_heads = 2, intermediate_size = 160 }
"""


class Letters:
    """A tokenizer of `VOCABULARY` ids; no text passes through it."""

    name = "letters"
    eot_id = 0
    vocab_size = VOCABULARY
    sha256 = hashlib.sha256(b"letters").hexdigest()

    def encode(self, text: str) -> Any:
        raise AssertionError(text)

    def decode(self, ids: Any) -> str:
        raise AssertionError(ids)

    def save(self, directory: Path) -> None:
        (directory / "sentencepiece.model").write_bytes(b"letters")
        (directory / "tokenizer.json").write_text(json.dumps({"kind": "sentencepiece", "sha256": self.sha256}))


def write_store(path: Path, *, tokens: int = 20_000) -> None:
    """A store of one source, in which each token says much about the next."""
    rng = np.random.default_rng(0)
    following = rng.integers(1, VOCABULARY, size=(VOCABULARY, 4))
    text = np.ones(tokens, dtype=np.uint32)
    for place in range(1, tokens):
        text[place] = following[text[place - 1], rng.integers(4)]
    with StoreWriter(path, Letters()) as writer:
        writer.source("text").append(text, num_bytes=tokens)
        writer.finish({})


def write_study(folder: Path, text: str = TINY, *, base: str = BASE, name: str = "tiny") -> Path:
    """NAME.toml in `folder`."""
    path = folder / f"{name}.toml"
    path.write_text(base + text, encoding="utf-8")
    return path


def pretend(study: Study, cell: Cell, losses: list[float], steps: list[int] | None = None) -> None:
    """A finished run of `cell`, with a line for each of `losses`; `steps`: theirs, by default from 1."""
    run = study.run(cell)
    run.create(cell.config)
    attempt = run.begin_attempt()
    with LineWriter(run.metrics) as writer:
        for step, loss in zip(steps or range(1, len(losses) + 1), losses, strict=True):
            writer.write({"step": step, "attempt": attempt, "loss": loss, "step_s": 0.5})
    last = cell.config.total_steps
    run.write_status("finished", reason="all steps are done", step=last, tokens=cell.config.total_tokens)
