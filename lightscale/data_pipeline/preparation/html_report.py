"""``report.html``: what became of a corpus. One file without scripts that loads nothing from elsewhere."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #4a7fb5; --lost: #c4703a; --dim: #8889; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin-bottom: .3rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
td.bar { width: 40%; text-align: left; }
.bar span { display: inline-block; height: .8rem; min-width: 1px; background: var(--bar); vertical-align: middle; }
.lost span { background: var(--lost); }
.chart { display: flex; align-items: flex-end; gap: 2px; height: 9rem; margin-top: 1rem; }
.chart div { flex: 1; background: var(--bar); min-height: 1px; }
.ticks { display: flex; gap: 2px; font-size: .7rem; } .ticks div { flex: 1; text-align: center; }
figure { margin: .6rem 0; } figcaption { font-size: .85rem; opacity: .75; overflow-wrap: anywhere; }
pre { margin: .2rem 0; padding: .5rem .7rem; border-left: 3px solid var(--lost); background: #8881;
      white-space: pre-wrap; overflow-wrap: anywhere; max-height: 12rem; overflow-y: auto; }
p.note { opacity: .75; }
"""


def make_html_report(report: dict[str, Any]) -> str:
    """The HTML of a preparation's ``report`` (see ``report.make_report``)."""
    total = sum(source["tokens"] for source in report["sources"].values())
    documents = sum(source["documents"] for source in report["sources"].values())
    tokenizer = report["tokenizer"]
    parts = [
        "<h1>Token store</h1>",
        f"<p>{total:,} tokens in {documents:,} documents, from {report['files']:,} files. "
        f"Tokenizer {_text(tokenizer['name'])}: {tokenizer['vocab_size']:,} ids, "
        f"sha256 {tokenizer['sha256'][:16]}…</p>",
        "<h2>Sources</h2>",
        _sources(report),
        *_classes(report),
        "<h2>Step by step</h2>",
        *(_stages(name, source) for name, source in report["corpus"].items()),
        "<h2>Lengths</h2>",
        *(_lengths(name, source["lengths"]) for name, source in report["corpus"].items()),
        "<h2>Problems while reading</h2>",
        _problems(report["problems"]),
        "<h2>Examples of dropped documents</h2>",
        *(_examples(name, source) for name, source in report["corpus"].items()),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Token store</title>\n'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], row_class: str = "") -> str:
    """``rows`` hold HTML; a cell that is a bar brings its own <td>."""
    head = "".join(f"<th>{_text(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr>{''.join(cell if cell.startswith('<td') else f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows
    )
    return f'<table class="{row_class}"><tr>{head}</tr>\n{body}</table>'


def _bar(share: float) -> str:
    return f'<td class="bar"><span style="width: {70 * share:.2f}%"></span> {share:.2%}</td>'


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f}"


def _sources(report: dict[str, Any]) -> str:
    weights = report["weights"] or {}
    total = sum(source["tokens"] for source in report["sources"].values()) or 1
    rows = [
        [
            _text(name),
            f"{source['documents']:,}",
            _megabytes(source["bytes"]),
            f"{source['tokens']:,}",
            f"{source['bytes_per_token']:.3f}",
            f"{100 * weights[name]:.6g}%" if name in weights else "",
            _bar(source["tokens"] / total),
        ]
        for name, source in report["sources"].items()
    ]
    headings = ("source", "documents", "MB of text", "tokens", "bytes/token", "weight", "share of tokens")
    entropy = report["unigram_entropy_nats"]
    note = f"Unigram entropy: {entropy['train']:.4f} nats/token (training)"
    if "validation" in entropy:
        note += f", {entropy['validation']:.4f} (validation, own frequencies)"
    return _table(headings, rows) + f'<p class="note">{note}</p>'


def _classes(report: dict[str, Any]) -> list[str]:
    labelled = {name: source["classes"] for name, source in report["sources"].items() if "classes" in source}
    if not labelled:
        return []
    parts = ["<h2>Classes</h2>"]
    for name, counts in labelled.items():
        total = sum(counts.values())
        rows = [
            [_text(one), f"{number}", f"{count:,}", _bar(count / total)]
            for number, (one, count) in enumerate(counts.items())
        ]
        parts += [f"<h3>{_text(name)}</h3>", _table(("class", "number", "documents", "share"), rows)]
    return parts


def _stages(name: str, source: dict[str, Any]) -> str:
    stages = source["stages"]
    first = max(stages["read"]["documents"], 1)
    rows = []
    for stage in ("read", "normalise", "filter", "deduplicate", "tokenize"):
        counts = stages[stage]
        tokens = f"{counts['tokens']:,}" if "tokens" in counts else ""
        cells = [stage, f"{counts['documents']:,}", _megabytes(counts["bytes"]), tokens]
        rows.append([*cells, _bar(counts["documents"] / first)])
    written = stages["write"]
    for split, counts in written.items():
        if counts["documents"]:
            cells = [f"write: {split}", f"{counts['documents']:,}", _megabytes(counts["bytes"])]
            rows.append([*cells, f"{counts['tokens']:,}", _bar(counts["documents"] / first)])
    parts = [
        f"<h3>{_text(name)} <small>(language: {_text(source['language'] or 'none')})</small></h3>",
        _table(("step", "documents left", "MB left", "tokens", "share of the documents read"), rows),
    ]
    reasons = [
        [
            _text(f"{stage}: {reason}"),
            f"{drop['documents']:,}",
            _megabytes(drop["bytes"]),
            _bar(drop["documents"] / first),
        ]
        for stage, counts in stages.items()
        for reason, drop in sorted(counts.get("dropped", {}).items(), key=lambda item: -item[1]["documents"])
    ]
    if reasons:
        parts.append(_table(("dropped because", "documents", "MB", "share of the documents read"), reasons, "lost"))
    for stage, what in (("normalise", "normalising"), ("filter", "filters")):
        changes = [
            [_text(change), f"{counts['documents']:,}", f"{counts['times']:,}"]
            for change, counts in stages[stage]["changed"].items()
        ]
        if changes:
            parts.append(_table((f"changed by {what}", "documents", "times"), changes))
    return "\n".join(parts)


def _lengths(name: str, lengths: list[int]) -> str:
    last = max((index for index, count in enumerate(lengths) if count), default=0)
    shown, highest = lengths[: last + 1], max([*lengths, 1])
    bars = "".join(
        f'<div style="height: {100 * count / highest:.1f}%" title="{2**index:,} to {2 ** (index + 1) - 1:,} tokens: '
        f'{count:,} documents"></div>'
        for index, count in enumerate(shown)
    )
    ticks = "".join(f"<div>{_power(index)}</div>" for index in range(len(shown)))
    caption = "Documents by length in tokens, end of text included; each bar starts at the length below it."
    chart = f'<div class="chart">{bars}</div><div class="ticks">{ticks}</div>'
    return f'<h3>{_text(name)}</h3>{chart}<p class="note">{caption}</p>'


def _power(exponent: int) -> str:
    value = 2**exponent
    return f"{value >> 20}M" if value >= 1 << 20 else f"{value >> 10}K" if value >= 1 << 10 else str(value)


def _problems(problems: dict[str, Any]) -> str:
    if not problems:
        return "<p>None.</p>"
    rows = [
        [_text(reason), f"{problem['count']:,}", f"<td>{'<br>'.join(map(_text, problem['examples'][:5]))}</td>"]
        for reason, problem in problems.items()
    ]
    return _table(("problem", "times", "where"), rows)


def _examples(name: str, source: dict[str, Any]) -> str:
    parts = []
    for stage, counts in source["stages"].items():
        for reason, drop in counts.get("dropped", {}).items():
            figures = [
                f"<figure><figcaption>{_text(example['id'])}{_like(example)}</figcaption><pre>{_text(example['text'])}</pre></figure>"
                for example in drop["examples"]
            ]
            title = f"{name}, {stage}: {reason} ({drop['documents']:,})"
            parts.append(f"<h3>{_text(title)}</h3>" + "".join(figures))
    return "\n".join(parts) or f"<p>No document of {_text(name)} was dropped.</p>"


def _like(example: dict[str, str]) -> str:
    return f" is a duplicate of {_text(example['like'])}" if "like" in example else ""
