"""What the Chinese rules keep of real text, as a table: ``python tools/texts/filter_shares.py FOLDER``.

FOLDER has the texts that ``real_text.py`` writes; what is missing is fetched. ``--dropped N`` shows the beginnings
of N dropped documents of each source, evenly spread, with rule and score: limits are to be judged by eye.
"""

import argparse
import json
import sys
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

from real_text import SOURCES, UnavailableError, fetch

from lightscale.data_pipeline.preparation.filters import RULES, THRESHOLDS, make_filter
from lightscale.data_pipeline.preparation.filters.document import DocumentView
from lightscale.data_pipeline.preparation.normalise import normalise

NAMES = ("zh-kernel", "zh-man", "zh-handbook", "zh", "zh-fortunes", "en")
_HEADS = (
    "source",
    "documents",
    "kept before",
    "kept now",
    "of 50 characters or more",
    "most common reasons of the rest",
)
_NUM_REASONS = 3
_BEGINNING = 300  # characters


class _OldView(DocumentView):
    @cached_property
    def lines(self) -> list[str]:
        return [line for line in map(str.strip, self.raw_lines) if line]


def kept_before(text: str) -> bool:
    """Whether the rules before their tuning for technical text kept it, whose measures lightscale no longer has.

    At least 0.3 of all characters that are no space had to be Chinese (a word of ten letters counted ten times), only
    marks of full width counted, and rules of tables were lines. Everything else was as it is.
    """
    document = _OldView(text, "Chinese character")
    chinese = len(document.chinese_characters)
    marks = sum(map(text.count, "，。、；：？！"))
    limits = dict(THRESHOLDS["zh"])
    punctuation = limits.pop("chinese_punctuation")
    limits.pop("chinese_characters")
    if any(RULES[name].drops(document, limit) for name, limit in limits.items()):
        return False
    return (
        chinese >= 0.3 * len(document.characters)
        and punctuation["min"] * chinese <= marks <= punctuation["max"] * chinese
    )


def shares(name: str, file: Path) -> dict[str, Any]:
    """The row of a source, and what is dropped of it."""
    texts = [normalise(json.loads(line)["text"]).text for line in file.open(encoding="utf-8")]
    texts = [text for text in texts if text.strip()]
    now = make_filter("zh")
    judged = [(now.judge(text), text) for text in texts]
    reasons = Counter(judgement.rule for judgement, _ in judged if judgement.rule is not None)
    kept = len(texts) - reasons.total()
    return {
        "source": SOURCES[name].what,
        "documents": len(texts),
        "kept_before": sum(map(kept_before, texts)) / len(texts),
        "kept": kept / len(texts),
        "kept_of_long": kept / max(1, len(texts) - reasons["size"]),
        "dropped": {rule: number / len(texts) for rule, number in reasons.most_common()},
        "texts": [(judgement.rule, judgement.score, text) for judgement, text in judged if judgement.rule is not None],
    }


def _row(found: dict[str, Any]) -> str:
    reasons = list(found["dropped"].items())[:_NUM_REASONS]
    said = ", ".join(f"`{rule}` {share:.3f}" for rule, share in reasons)
    numbers = " | ".join(f"{found[key]:.3f}" for key in ("kept_before", "kept", "kept_of_long"))
    return f"| {found['source']} | {found['documents']} | {numbers} | {said} |"


def main() -> int:
    """Fetch what is missing, and print the table."""
    parser = argparse.ArgumentParser(description="Share of real text that the Chinese rules keep, before and now.")
    parser.add_argument("folder", type=Path, help="folder of the texts of real_text.py; missing texts are downloaded")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"sources; without any: {' '.join(NAMES)}")
    parser.add_argument("--json", action="store_true", help="print every reason as one JSON object")
    parser.add_argument("--dropped", type=int, default=0, metavar="N", help="show N dropped documents of each source")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in SOURCES]:
        parser.error(f"{unknown[0]}: use some of {', '.join(SOURCES)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name in args.names or NAMES:
        file = args.folder / f"{name}.jsonl"
        try:
            rows[name] = shares(name, file if file.exists() else fetch(name, args.folder))
        except UnavailableError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        dropped = rows[name].pop("texts")
        for rule, score, text in dropped[:: max(1, len(dropped) // max(1, args.dropped))][: args.dropped]:
            measured = "" if score is None else f" {score:.3f}"
            print(f"--- {name}: {rule}{measured}, {len(text)} characters", text[:_BEGINNING], sep="\n", file=sys.stderr)
    if args.json:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return 0
    print("|".join(("", *(f" {head} " for head in _HEADS), "")), "|---" * len(_HEADS) + "|", sep="\n")
    for found in rows.values():
        print(_row(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
