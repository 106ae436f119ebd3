"""``lightscale data train-classifier``: a filter's classifier from good and bad examples."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightscale.config.arguments import path_argument
from lightscale.data_pipeline.commands.corpus import text_path
from lightscale.data_pipeline.preparation.corpus import Corpus, make_corpus
from lightscale.data_pipeline.preparation.filters import classifier
from lightscale.data_pipeline.preparation.normalise import normalise
from lightscale.data_pipeline.preparation.readers import cut_into_ranges, read
from lightscale.data_pipeline.preparation.readers.inputs import Problems
from lightscale.data_pipeline.preparation.sources import FileLister
from lightscale.errors import UserError
from lightscale.output.terminal import plain_console

_BITS, _PENALTY, _HELD_OUT = 18, 1e-4, 0.1
_FEWEST = 10
_WHOLE_FILE = 2**62
_SEED = 5
_KINDS = ("good", "bad")


def add_parser(commands: Any) -> None:
    """Add ``train-classifier`` to the commands of ``lightscale data``."""
    text = "train a linear classifier on good and bad texts, for the filter `classifier` of corpus files"
    parser = commands.add_parser("train-classifier", help=text, description=text)
    add = parser.add_argument
    for kind in _KINDS:
        add(f"--{kind}", required=True, nargs="+", type=text_path, metavar="PATH", help=f"files of {kind} examples")
    add("--out", required=True, type=path_argument, metavar="FILE", help="the classifier to write; must not exist")
    add("--text-field", default="text", help="field of the text in jsonl and parquet files (default: %(default)s)")
    add("--bits", type=int, default=_BITS, help="2^BITS buckets for words and pairs (default: %(default)s)")
    add("--penalty", type=float, default=_PENALTY, help="L2 penalty of the weights (default: %(default)s)")
    add(
        "--held-out",
        type=float,
        default=_HELD_OUT,
        metavar="SHARE",
        help="share of the texts held out to measure accuracy (default: %(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run_data=_train)


def _train(args: argparse.Namespace) -> int:
    if not 1 <= args.bits <= classifier.MOST_BITS:
        raise UserError(f"--bits {args.bits}: must be from 1 to {classifier.MOST_BITS}")
    if not 0 < args.penalty <= 1e6:
        raise UserError(f"--penalty {args.penalty}: must be above 0 and at most 1e6")
    if not 0 <= args.held_out < 1:
        raise UserError(f"--held-out {args.held_out}: must be from 0 to below 1")
    if args.out.exists():
        raise UserError(f"--out {args.out}: the file exists; use a new path")
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: directory {args.out.parent} does not exist")
    sources = {
        kind: {"paths": [str(path) for path in getattr(args, kind)], "text_field": args.text_field} for kind in _KINDS
    }
    corpus = make_corpus({"sources": sources}, origin="command line")
    problems = Problems()
    fitted: dict[str, list[NDArray[np.int64]]] = {}
    held: dict[str, list[NDArray[np.int64]]] = {}
    for kind in _KINDS:
        fitted[kind], held[kind] = [], []
        for text in _texts(corpus, kind, problems):
            # By the text: the same one is never on both sides.
            is_held = xxhash.xxh3_64_intdigest(text.encode(), seed=_SEED) / 2**64 < args.held_out
            (held if is_held else fitted)[kind].append(classifier.features(text, bits=args.bits))
        if len(fitted[kind]) < _FEWEST:
            raise UserError(f"--{kind}: {len(fitted[kind])} texts to fit; at least {_FEWEST} are needed")
    weights, bias = classifier.fit(fitted["good"], fitted["bad"], bits=args.bits, penalty=args.penalty)
    scores = {kind: [classifier.probability(row, weights, bias) for row in held[kind]] for kind in _KINDS}
    found: dict[str, Any] = {
        "fitted": {kind: len(fitted[kind]) for kind in _KINDS},
        "held_out": {kind: len(held[kind]) for kind in _KINDS},
        "accuracy": {
            "good": _mean([score >= 0.5 for score in scores["good"]]),
            "bad": _mean([score < 0.5 for score in scores["bad"]]),
        },
        "auc": _auc(scores["good"], scores["bad"]),
        "bits": args.bits,
        "penalty": args.penalty,
    }
    classifier.save(args.out, weights, bias, about=found)
    if args.json:
        print(json.dumps({"classifier": str(args.out), **found, "problems": problems.as_json()}))
        return 0
    console = plain_console(soft_wrap=True)
    for kind in _KINDS:
        right = found["accuracy"][kind]
        total = len(held[kind])
        share = "none held out" if right is None else f"{right:.1%} of {total:,} held-out texts classified correctly"
        console.print(f"{kind}: {len(fitted[kind]):,} texts; {share}")
    for reason, problem in problems.as_json().items():
        console.print(f"warning: {reason}: {problem['count']:,}")
    ranked = "" if found["auc"] is None else f" In {found['auc']:.1%} of pairs the good text scores higher."
    console.print(f"wrote {args.out}.{ranked}")
    return 0


def _texts(corpus: Corpus, name: str, problems: Problems) -> Iterator[str]:
    config, options = corpus.sources[name], corpus.read_options(name)
    for file in FileLister(problems, after=None).files(config.paths, suffixes=config.suffixes):
        for file_range in cut_into_ranges(file, _WHOLE_FILE, problems, options=options):
            for raw in read(file_range, problems, options=options, advance=lambda num_bytes: None):
                text = normalise(raw.data).text
                if text and not text.isspace():
                    yield text


def _mean(right: list[bool]) -> float | None:
    return sum(right) / len(right) if right else None


def _auc(good: list[float], bad: list[float]) -> float | None:
    """How often a good text's score is above a bad one's; equal ones count half."""
    if not good or not bad:
        return None
    ordered = np.sort(np.array(bad))
    below, up_to = (np.searchsorted(ordered, good, side=side) for side in ("left", "right"))
    return float((below + up_to).mean() / 2 / len(bad))
