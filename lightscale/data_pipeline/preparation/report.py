"""The counts of a preparation: ``report.json`` for programs. ``html_report.py`` makes ``report.html`` of it.

Nothing in it depends on time, machine, workers or interruptions.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation.assemble import SPLITS, OutputSource, classes, read_kept, unit_files
from lightscale.data_pipeline.preparation.corpus import Corpus
from lightscale.data_pipeline.preparation.counts import NUM_LENGTHS, StepCounts
from lightscale.data_pipeline.preparation.plan import PreparationPlan
from lightscale.data_pipeline.preparation.readers.inputs import Problems
from lightscale.data_pipeline.preparation.units import Context, UnitCounts
from lightscale.data_pipeline.store.format import Split, TokenizerIdentity
from lightscale.errors import counted


def make_report(
    context: Context, outputs: list[OutputSource], token_counts: dict[Split, NDArray[np.int64]]
) -> dict[str, Any]:
    """The content of ``report.json``.

    ``outputs``: the sources of the store; ``token_counts``: (vocab_size,) how often each token is in a split.
    """
    problems = Problems()
    base = context.base
    more = {} if base is None else {"base": base.description(), "known": _known(context)}
    corpus = {name: _source_report(context, name, problems) for name in context.corpus.sources}
    names = classes(context)
    return {
        "tokenizer": asdict(TokenizerIdentity.of(context.tokenizer)),
        "sources": {output.name: _output_report(output, names) for output in outputs},
        "unigram_entropy_nats": entropies(token_counts),
        "corpus": corpus,
        "weights": context.corpus.weights,
        "units": len(context.plan.units),
        "files": context.plan.num_files,
        "problems": problems.as_json(),
        **more,
    }


def _known(context: Context) -> dict[str, int]:
    """What of the corpus the store that is added to had already."""
    return {
        "files": context.plan.num_known_files,
        "documents": sum(read_kept(context, unit)["known"] for unit in context.plan.units),
    }


def unigram_entropy(counts: NDArray[np.int64], under: NDArray[np.int64] | None = None) -> float:
    """Cross entropy in nats per token of a model of the token frequencies alone.

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


class DropSummary:
    """Why no document of a corpus is left, for the error message."""

    def __init__(self) -> None:
        self._problems = Problems()
        self._dropped: Counter[str] = Counter()

    def add(self, counts: dict[str, Any]) -> None:
        """Add the counts of a unit."""
        self._problems.merge(counts["problems"])
        for step in counts["stages"].values():
            self.drop(step)

    def drop(self, step: dict[str, Any]) -> None:
        """Add the documents that a step dropped."""
        for reason, dropped in step["dropped"].items():
            self._dropped[reason] += dropped["documents"]

    def description(self, corpus: Corpus, plan: PreparationPlan) -> str:
        """Files read, problems with some examples, documents dropped by reason, share held out."""
        for problems in plan.problems.values():
            self._problems.merge(problems)
        counts = sorted([*self._problems.counts.items(), *self._dropped.items()])
        examples = [where for found in self._problems.examples.values() for where in found][:3]
        shares = {f"{corpus.validation_of(name):.0%}" for name in corpus.sources} - {"0%"}
        return (
            ", ".join([f"{counted(plan.num_files, 'file')} read", *(f"{count} × {reason}" for reason, count in counts)])
            + (f" ({'; '.join(examples)})" if examples else "")
            + (f"; {' and '.join(sorted(shares))} of the documents are held out" if shares else "")
        )


def _output_report(output: OutputSource, classes: Sequence[str]) -> dict[str, Any]:
    counts = output.counts
    return {
        "documents": counts.documents,
        "bytes": counts.bytes,
        "tokens": counts.tokens,
        "bytes_per_token": counts.bytes / counts.tokens,
        **({"classes": {name: output.classes.get(name, 0) for name in classes}} if output.classes else {}),
    }


def entropies(token_counts: dict[Split, NDArray[np.int64]]) -> dict[str, float]:
    """The unigram entropies of the splits, of how often each token is in them; see ``unigram_entropy``."""
    train, validation = token_counts["train"], token_counts["validation"]
    # Of what is added to a store either may be empty.
    entropies = {"train": unigram_entropy(train)} if train.any() else {}
    if validation.any():
        entropies["validation"] = unigram_entropy(validation)
        entropies["validation_under_train"] = unigram_entropy(validation, train)
    return entropies


def _source_report(context: Context, source: str, problems: Problems) -> dict[str, Any]:
    """The steps of one source of the corpus; adds what was wrong with it to ``problems``."""
    total, deduplicated = UnitCounts(), StepCounts()
    total.problems.merge(context.plan.problems[source])
    written = {split: {"documents": 0, "bytes": 0, "tokens": 0} for split in SPLITS}
    lengths = np.zeros(NUM_LENGTHS, dtype=np.int64)
    for unit in context.plan.units:
        if unit.source == source:
            total.merge(unit_files(context, unit).counts())
            kept = read_kept(context, unit)
            deduplicated.merge(StepCounts.from_json(kept["deduplicate"]))
            for split, counts in kept["splits"].items():
                lengths += counts["lengths"]
                for key in written[split]:
                    written[split][key] += counts[key]
    problems.merge(total.problems.as_part())
    config = context.corpus.sources[source]
    steps = {name: step.as_json() for name, step in total.steps.items()}
    for name, changes in total.changes.items():
        steps[name]["changed"] = changes.as_json()
    tokens = {key: sum(counts[key] for counts in written.values()) for key in ("documents", "bytes", "tokens")}
    return {
        "language": config.language,
        "weight": config.weight,
        "stages": {**steps, "deduplicate": deduplicated.as_json(), "tokenize": tokens, "write": written},
        "lengths": lengths.tolist(),
    }
