"""What a preparation counted: ``report.json`` for programs. ``page.py`` makes ``report.html`` of it.

Nothing in it depends on time, machine, workers or interruptions.
"""

from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation.assemble import SPLITS, OutputSource, read_kept, unit_files
from lightscale.data_pipeline.preparation.corpus import Corpus
from lightscale.data_pipeline.preparation.counts import NUM_LENGTHS, Stage
from lightscale.data_pipeline.preparation.plan import Plan
from lightscale.data_pipeline.preparation.sources import Problems
from lightscale.data_pipeline.preparation.units import Context, UnitTally
from lightscale.data_pipeline.store.format import Split, TokenizerIdentity


def make_report(
    context: Context, outputs: list[OutputSource], token_counts: dict[Split, NDArray[np.int64]]
) -> dict[str, Any]:
    """The content of ``report.json``.

    ``outputs``: the sources of the store; ``token_counts``: (vocab_size,) how often each token is in a split.
    """
    problems = Problems()
    corpus = {name: _source_report(context, name, problems) for name in context.corpus.sources}
    return {
        "tokenizer": asdict(TokenizerIdentity.of(context.tokenizer)),
        "sources": {output.name: _output_report(output) for output in outputs},
        "unigram_entropy_nats": _entropies(token_counts),
        "corpus": corpus,
        "weights": context.corpus.weights,
        "units": len(context.plan.units),
        "files": context.plan.num_files,
        "problems": problems.as_json(),
    }


def unigram_entropy(counts: NDArray[np.int64], under: NDArray[np.int64] | None = None) -> float:
    """Nats per token that a model pays which knows nothing but how often each token is.

    ``counts``: (vocab_size,) occurrences in the text to be coded. ``under``: those in the text that the
    frequencies were learned from, one added to each so that none is impossible; none: ``counts`` themselves,
    the entropy proper.
    """
    present = counts > 0
    shares = counts[present] / counts.sum()
    if under is None:
        return float(-(shares * np.log(shares)).sum())
    learned = (under[present] + 1) / (under.sum() + len(under))
    return float(-(shares * np.log(learned)).sum())


class Seen:
    """What there was in a corpus of which nothing is left."""

    def __init__(self) -> None:
        self._problems = Problems()
        self._dropped: Counter[str] = Counter()

    def add(self, tally: dict[str, Any]) -> None:
        """Add the tally of a unit."""
        self._problems.merge(tally["problems"])
        for stage in tally["stages"].values():
            self.drop(stage)

    def drop(self, stage: dict[str, Any]) -> None:
        """Add what a stage left out."""
        for reason, dropped in stage["dropped"].items():
            self._dropped[reason] += dropped["documents"]

    def words(self, corpus: Corpus, plan: Plan) -> str:
        """All of it."""
        for problems in plan.problems.values():
            self._problems.merge(problems)
        counts = sorted([*self._problems.counts.items(), *self._dropped.items()])
        places = [place for examples in self._problems.examples.values() for place in examples][:3]
        shares = {f"{corpus.validation_of(name):.0%}" for name in corpus.sources} - {"0%"}
        return (
            ", ".join([f"{plan.num_files} files read", *(f"{count} × {reason}" for reason, count in counts)])
            + (f" ({'; '.join(places)})" if places else "")
            + (f"; {' and '.join(sorted(shares))} of the documents are held out" if shares else "")
        )


def _output_report(output: OutputSource) -> dict[str, Any]:
    counts = output.counts
    return {
        "documents": counts.documents,
        "bytes": counts.bytes,
        "tokens": counts.tokens,
        "bytes_per_token": counts.bytes / counts.tokens,
    }


def _entropies(token_counts: dict[Split, NDArray[np.int64]]) -> dict[str, float]:
    train, validation = token_counts["train"], token_counts["validation"]
    entropies = {"train": unigram_entropy(train)}
    if validation.any():
        entropies["validation"] = unigram_entropy(validation)
        entropies["validation_under_train"] = unigram_entropy(validation, train)
    return entropies


def _source_report(context: Context, source: str, problems: Problems) -> dict[str, Any]:
    """The stages of one source of the corpus; adds what was wrong with it to ``problems``."""
    tally, deduplicated = UnitTally(), Stage()
    tally.problems.merge(context.plan.problems[source])
    written = {split: {"documents": 0, "bytes": 0, "tokens": 0} for split in SPLITS}
    lengths = np.zeros(NUM_LENGTHS, dtype=np.int64)
    for unit in context.plan.units:
        if unit.source == source:
            tally.merge(unit_files(context, unit).tally())
            kept = read_kept(context, unit)
            deduplicated.merge(Stage.from_json(kept["deduplicate"]))
            for split, counts in kept["splits"].items():
                lengths += counts["lengths"]
                for key in written[split]:
                    written[split][key] += counts[key]
    problems.merge(tally.problems.as_json())
    config = context.corpus.sources[source]
    stages = {name: stage.as_json() for name, stage in tally.stages.items()}
    stages["normalise"]["changed"] = {
        change: {"documents": tally.changed_documents[change], "times": times}
        for change, times in sorted(tally.changes.items())
    }
    tokens = {key: sum(counts[key] for counts in written.values()) for key in ("documents", "bytes", "tokens")}
    return {
        "language": config.language,
        "weight": config.weight,
        "stages": {**stages, "deduplicate": deduplicated.as_json(), "tokenize": tokens, "write": written},
        "lengths": lengths.tolist(),
    }
