"""``report.html``: the counts of a preparation as one page."""

from typing import Any

from lightscale.output.html import Bar, Cell, Column, Html


def make_html_report(report: dict[str, Any]) -> str:
    """The HTML of a preparation's ``report`` (see ``report.make_report``)."""
    total = sum(source["tokens"] for source in report["sources"].values())
    documents = sum(source["documents"] for source in report["sources"].values())
    tokenizer, corpus = report["tokenizer"], report["corpus"]
    html = Html("Token store")
    html.paragraph(
        f"{total:,} tokens in {documents:,} documents, from {report['files']:,} files. Tokenizer {tokenizer['name']}: "
        f"{tokenizer['vocab_size']:,} ids, sha256 {tokenizer['sha256'][:16]}…"
    )
    html.heading("Sources")
    _add_sources(html, report)
    _add_classes(html, report)
    html.heading("Step by step")
    for name, source in corpus.items():
        _add_steps(html, name, source)
    html.heading("Lengths")
    for name, source in corpus.items():
        _add_lengths(html, name, source["lengths"])
    html.heading("Problems while reading")
    _add_problems(html, report["problems"])
    html.heading("Examples of dropped documents")
    for name, source in corpus.items():
        _add_examples(html, name, source)
    return html.text()


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f}"


def _add_sources(html: Html, report: dict[str, Any]) -> None:
    weights = report["weights"] or {}
    total = sum(source["tokens"] for source in report["sources"].values()) or 1
    headings = ("source", "documents", "MB of text", "tokens", "bytes/token", "weight", "share of tokens")
    html.table(
        headings,
        [
            [
                name,
                f"{source['documents']:,}",
                _megabytes(source["bytes"]),
                f"{source['tokens']:,}",
                f"{source['bytes_per_token']:.3f}",
                f"{100 * weights[name]:.6g}%" if name in weights else "",
                Bar(source["tokens"] / total),
            ]
            for name, source in report["sources"].items()
        ],
    )
    entropy = report["unigram_entropy_nats"]
    note = f"Unigram entropy: {entropy['train']:.4f} nats/token (training)"
    if "validation" in entropy:
        note += f", {entropy['validation']:.4f} (validation, own frequencies)"
    html.paragraph(note, note=True)


def _add_classes(html: Html, report: dict[str, Any]) -> None:
    labelled = {name: source["classes"] for name, source in report["sources"].items() if "classes" in source}
    if labelled:
        html.heading("Classes")
    for name, counts in labelled.items():
        total = sum(counts.values())
        rows: list[list[Cell]] = [
            [one, f"{number}", f"{count:,}", Bar(count / total)] for number, (one, count) in enumerate(counts.items())
        ]
        html.heading(name, 3)
        html.table(("class", "number", "documents", "share"), rows)


def _add_steps(html: Html, name: str, source: dict[str, Any]) -> None:
    stages = source["stages"]
    first = max(stages["read"]["documents"], 1)
    shown = {stage: stages[stage] for stage in ("read", "normalise", "filter", "deduplicate", "tokenize")}
    shown |= {f"write: {split}": counts for split, counts in stages["write"].items() if counts["documents"]}
    html.heading(f"{name} (language: {source['language'] or 'none'})", 3)
    html.table(
        ("step", "documents left", "MB left", "tokens", "share of the documents read"),
        [
            [
                step,
                f"{counts['documents']:,}",
                _megabytes(counts["bytes"]),
                f"{counts['tokens']:,}" if "tokens" in counts else "",
                Bar(counts["documents"] / first),
            ]
            for step, counts in shown.items()
        ],
    )
    reasons: list[list[Cell]] = [
        [
            f"{stage}: {reason}",
            f"{drop['documents']:,}",
            _megabytes(drop["bytes"]),
            Bar(drop["documents"] / first, lost=True),
        ]
        for stage, counts in stages.items()
        for reason, drop in sorted(counts.get("dropped", {}).items(), key=lambda item: -item[1]["documents"])
    ]
    if reasons:
        html.table(("dropped because", "documents", "MB", "share of the documents read"), reasons)
    for stage, what in (("normalise", "normalising"), ("filter", "filters")):
        changes = [
            [change, f"{counts['documents']:,}", f"{counts['times']:,}"]
            for change, counts in stages[stage]["changed"].items()
        ]
        if changes:
            html.table((f"changed by {what}", "documents", "times"), changes)


def _add_lengths(html: Html, name: str, lengths: list[int]) -> None:
    last = max((index for index, count in enumerate(lengths) if count), default=0)
    columns = [
        Column(
            height=count,
            tick=_power(index),
            title=f"{2**index:,} to {2 ** (index + 1) - 1:,} tokens: {count:,} documents",
        )
        for index, count in enumerate(lengths[: last + 1])
    ]
    html.heading(name, 3)
    html.chart(columns, "Documents by length in tokens, end of text included; each bar starts at the length below it.")


def _power(exponent: int) -> str:
    value = 2**exponent
    return f"{value >> 20}M" if value >= 1 << 20 else f"{value >> 10}K" if value >= 1 << 10 else str(value)


def _add_problems(html: Html, problems: dict[str, Any]) -> None:
    if not problems:
        html.paragraph("None.")
        return
    rows = [
        [reason, f"{problem['count']:,}", "\n".join(map(str, problem["examples"][:5]))]
        for reason, problem in problems.items()
    ]
    html.table(("problem", "times", "where"), rows)


def _add_examples(html: Html, name: str, source: dict[str, Any]) -> None:
    dropped = [
        (f"{stage}: {reason}", drop)
        for stage, counts in source["stages"].items()
        for reason, drop in counts.get("dropped", {}).items()
    ]
    if not dropped:
        html.paragraph(f"No document of {name} was dropped.")
    for title, drop in dropped:
        html.heading(f"{name}, {title} ({drop['documents']:,})", 3)
        for example in drop["examples"]:
            like = f" is a duplicate of {example['like']}" if "like" in example else ""
            html.lines(example["text"], f"{example['id']}{like}")
