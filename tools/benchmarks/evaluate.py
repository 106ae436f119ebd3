"""Evaluation: packed rows beside padded ones, prefixes kept or run again, ours beside lm-eval's `hf` class.

``run`` writes checkpoints of random weights. The first two parts ask synthetic requests of lengths like those of
multiple choice, of a TNL and a LLaMA, and compare answers too. The third asks the questions of common-sense reasoning
as lm-eval does, of one LLaMA by our class and, exported, by lm-eval's `hf` with transformers, at the batch size that
suits it best. It needs lm-eval and the files of ``tools/texts/benchmark_data.py``.

Ways take turns; time is that of the process, on one thread, so that others on the machine hardly matter.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.exports import byte_tokenizer, write_run
from benchmarks.turns import positive, time_in_turns
from lightscale.cli import main
from lightscale.config.files import load
from lightscale.data_pipeline.tokenizers import Tokenizer, train_sentencepiece
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import choose_run
from lightscale.evaluation.harness.csr import BESIDE, COLUMNS
from lightscale.evaluation.harness.local_data import LOCAL_TASKS, local_file
from lightscale.evaluation.harness.tasks import Tasks, scores_of
from lightscale.evaluation.harness_names import INSTALL, tasks_folder
from lightscale.evaluation.inference.forward import Forward, Rows
from lightscale.evaluation.inference.packing import Placed, ScoredDocument, columns, forest
from lightscale.evaluation.inference.requests import Answer, Ids, Likelihood, LogLikelihood, Request
from lightscale.evaluation.inference.scoring import Scorer, ScoringSettings
from lightscale.evaluation.model import mesh_of, restore
from lightscale.models.language_model import LanguageModel
from lightscale.parallel.mesh import Mesh

LEAST_OF_HF = 1.5
BATCH_SIZES = (1, 8, 32)
CONFIG = """
extends = ["arch/{mixer}"]
[model]
num_layers = {num_layers}
hidden_size = {hidden_size}
num_heads = {num_heads}
intermediate_size = {intermediate_size}
vocab_size = {vocab_size}
[data]
store = "store"
sequence_length = 2048
[optimizer]
lr = 1e-3
[train]
steps = 1
global_batch_size = 1
precision = "fp32"
device = "cpu"
"""
SIZE = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "intermediate_size": 768}
VOCABULARY = 4_000


_REQUESTS, _PADDED_ROWS = 120, 16
_SHOTS_TOKENS, _QUESTIONS, _CHOICES = 400, 15, 4


def run(*, data: Path | None, questions: int, repeats: int) -> Iterator[dict[str, Any]]:
    """What is known so far, part by part."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-evaluate-") as name:
        for mixer in ("tnl", "llama"):
            path = Path(name, mixer)
            _write(path, mixer, byte_tokenizer())
            chosen = choose_run(path)
            with mesh_of(chosen.config) as mesh:
                figures[mixer] = _packed_and_shared(restore(chosen, mesh).model, mesh, repeats)
            yield figures
        if data is not None:
            figures["lm_eval"] = _beside_lm_eval(Path(name), data, questions, repeats)
            yield figures


def _write(path: Path, mixer: str, tokenizer: Tokenizer) -> None:
    file = path.with_suffix(".toml")
    vocab_size = -(-tokenizer.vocab_size // 64) * 64
    file.write_text(CONFIG.format(mixer=mixer, vocab_size=vocab_size, **SIZE), encoding="utf-8")
    write_run(path, load(file), tokenizer)


def _packed_and_shared(model: LanguageModel, mesh: Mesh, repeats: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)

    def ids(length: int) -> Ids:
        return draw.integers(0, 256, length, dtype=np.int32)

    lengths = np.clip(draw.lognormal(4.2, 0.8, _REQUESTS).astype(int), 12, 600)
    alone: list[Request] = [LogLikelihood(context=ids(length), continuation=ids(8)) for length in lengths]
    shots = ids(_SHOTS_TOKENS)
    shared: list[Request] = []
    for _ in range(_QUESTIONS):
        context = np.concatenate([shots, ids(40)])
        shared += [LogLikelihood(context=context, continuation=ids(10)) for _ in range(_CHOICES)]
    packed, kept = Scorer(model, mesh), Scorer(model, mesh)
    again = Scorer(model, mesh, settings=ScoringSettings(least_shared=None))
    return {
        "packed": _compared(
            {"packed": lambda: _values(packed.answer(alone)), "padded": lambda: _padded(model, mesh, alone)},
            len(alone),
            repeats,
        ),
        "prefix": _compared(
            {"kept": lambda: _values(kept.answer(shared)), "again": lambda: _values(again.answer(shared))},
            len(shared),
            repeats,
        )
        | {"tokens_of_again": kept.work.run_tokens / again.work.run_tokens},
    }


def _values(answers: Sequence[Answer]) -> list[float]:
    return [answer.log_probability for answer in answers if isinstance(answer, Likelihood)]


def _padded(model: LanguageModel, mesh: Mesh, requests: Sequence[Request]) -> list[float]:
    """The usual way: batches of about one length, each request a row, filled up to the longest."""
    documents = [
        ScoredDocument(np.concatenate([one.context, one.continuation]), len(one.context))
        for one in requests
        if isinstance(one, LogLikelihood)
    ]
    nodes = forest(documents, range(len(documents)), least_shared=None)
    nodes.sort(key=lambda node: len(node.inputs), reverse=True)
    values, forward = np.zeros(len(documents)), Forward(model, mesh)
    for first in range(0, len(nodes), _PADDED_ROWS):
        batch = nodes[first : first + _PADDED_ROWS]
        rows = columns([[Placed(node, 0)] for node in batch], 0, len(batch[0].inputs), filler=256)
        for found in forward.score([Rows(columns=rows)]):
            np.add.at(values, found.numbers, found.log_probability)
    return [float(value) for value in values]


def _compared(ways: dict[str, Callable[[], list[float]]], num_requests: int, repeats: int) -> dict[str, Any]:
    """Requests per second of two ways, how many times faster the first is, and by how much answers differ."""
    answers: dict[str, list[float]] = {}

    def work(name: str) -> Callable[[], object]:
        def ask() -> None:
            answers[name] = ways[name]()

        return ask

    samples_s = time_in_turns({name: {"answer": work(name)} for name in ways}, repeats, clock=time.process_time)
    first, second = ways
    median_s = {name: statistics.median(samples_s[name]["answer"]) for name in ways}
    return {
        "requests": num_requests,
        "requests_per_s": {name: num_requests / seconds for name, seconds in median_s.items()},
        "times": median_s[second] / median_s[first],
        "most_different": max(abs(one - other) for one, other in zip(answers[first], answers[second], strict=True)),
        "samples_s": {name: samples_s[name]["answer"] for name in ways},
    }


def _beside_lm_eval(folder: Path, data: Path, questions: int, repeats: int) -> dict[str, Any]:
    """The CSR mixture, ``questions`` of each task, by two of lm-eval's classes of models."""
    # Optional packages; the first two parts need none.
    from lm_eval.api.instance import Instance  # noqa: PLC0415
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

    from lightscale.evaluation.harness.model import LightscaleLM  # noqa: PLC0415

    names = [task for task, _ in (COLUMNS | BESIDE).values()]
    tasks = Tasks(names, data)
    asked = tasks.asked(questions)
    instances = [Instance(one.kind, {}, one.arguments, 0) for one in asked]
    tokenizer = train_sentencepiece((" ".join(one.arguments) for one in asked), vocab_size=VOCABULARY)
    run, exported = folder / "run", folder / "exported"
    _write(run, "llama", tokenizer)
    if main(["export", str(run), "--to", str(exported), "--dtype", "fp32"]):
        raise RuntimeError("the export failed")
    theirs = {
        size: HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=size) for size in BATCH_SIZES
    }
    ours = LightscaleLM(str(run), device="cpu")
    by_size_s = {}
    for size, model in theirs.items():
        begun = time.process_time()
        model.loglikelihood(instances, disable_tqdm=True)
        by_size_s[size] = time.process_time() - begun
    best = min(by_size_s, key=lambda size: by_size_s[size])
    answers: dict[str, list[tuple[float, bool]]] = {}

    def values(name: str, model: Any) -> list[float]:
        answers[name] = model.loglikelihood(instances, disable_tqdm=True)
        return [value for value, _ in answers[name]]

    ways = {"lightscale": lambda: values("lightscale", ours), "hf": lambda: values("hf", theirs[best])}
    figures = _compared(ways, len(instances), repeats)
    figures |= {"questions_of_each_task": questions, "hf_batch_size": best, "hf_once_s": by_size_s}
    for name, found in answers.items():
        given = dict(zip((one.key for one in asked), found, strict=True))
        scores = scores_of(tasks.judged(given, questions))
        figures.setdefault("scores", {})[name] = {f"{task} {metric}": value for task, metric, value, _ in scores}
    return figures | {"target": LEAST_OF_HF, "reached": figures["times"] >= LEAST_OF_HF}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the third part asks."""
    parser.add_argument("--data", type=Path, default=Path("data/evaluation"), help="of benchmark_data.py")
    parser.add_argument("--questions", type=positive, default=20, help="questions per task (default 20)")
    parser.add_argument("--without-lm-eval", action="store_true", help="only the first two parts")


def run_arguments(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """``run`` as the command line asks for it. UserError where lm-eval or its data is missing, before anything runs."""
    if not args.without_lm_eval:
        if tasks_folder() is None:
            raise UserError(f"lm-eval is not installed: {INSTALL}, or --without-lm-eval")
        lacking = [name for name in LOCAL_TASKS if local_file(name, args.data) is None]
        if lacking:
            raise UserError(
                f"--data {args.data}: no questions of {', '.join(lacking)}; run python tools/texts/benchmark_data.py "
                f"--out {args.data}, or --without-lm-eval"
            )
    data = None if args.without_lm_eval else args.data
    yield from run(data=data, questions=args.questions, repeats=args.repeats)


def table(figures: dict[str, Any]) -> Table:
    """For people."""
    rows = Table("what")
    for heading in ("requests/s", "beside", "requests/s", "times", "most different"):
        rows.add_column(heading, justify="right")
    compared = [
        (f"{mixer}, {part}", figures[mixer][part])
        for mixer in ("tnl", "llama")
        if mixer in figures
        for part in ("packed", "prefix")
    ]
    if "lm_eval" in figures:
        compared.append(("llama, CSR", figures["lm_eval"]))
    for name, found in compared:
        first, second = found["requests_per_s"]
        speeds = found["requests_per_s"]
        rows.add_row(
            f"{name}: {first}", f"{speeds[first]:.1f}", second, f"{speeds[second]:.1f}",
            f"{found['times']:.2f}", f"{found['most_different']:.1e}",
        )  # fmt: skip
    return rows
