"""Published results of arXiv 2406.16690: Tables 3, 5 and 6. C is most probably in PFLOP-days.

The paper names no unit; with PFLOP-days, its N_opt and D_opt at the compute of its 7B runs are near those runs.
"""

from dataclasses import dataclass

Law = tuple[float, float]
"""Coefficient and exponent."""

TABLE_3: dict[str, tuple[Law, Law, Law]] = {
    "llama": ((3.7087, -0.0798), (1.82e8, 0.7118), (2.56e10, 0.5102)),
    "tnl": ((3.5391, -0.0768), (2.74e8, 0.6470), (4.43e10, 0.4684)),
    "hgrn2": ((3.4788, -0.0753), (2.66e8, 0.6427), (4.80e10, 0.4500)),
    "cosformer2": ((3.5877, -0.0756), (2.65e8, 0.6516), (4.23e10, 0.4529)),
}
"""L(C), N_opt(C) and D_opt(C) of each architecture."""


@dataclass(frozen=True, kw_only=True)
class PublishedScores:
    """A row of Table 5 or 6: models of 1B."""

    architecture: str
    hidden_size: int
    num_layers: int
    sequence_length: int
    csr: float
    """Average of seven common-sense tasks, %."""
    wikitext: float
    """Perplexity."""
    lambada: float
    """Perplexity."""
    niah: float
    """Needle in a haystack, weighted accuracy, %."""
    scrolls: float


SCORES = {
    "CSR": "csr",
    "WikiText-2 ppl": "wikitext",
    "LAMBADA ppl": "lambada",
    "NIAH": "niah",
    "SCROLLS": "scrolls",
}
"""Heading and field of each score."""

_Scores = tuple[float, float, float, float, float]


def _aspect(architecture: str, *rows: _Scores) -> list[PublishedScores]:
    shapes = ((1536, 32), (1792, 24), (2048, 18), (3072, 8))
    return [
        _row(architecture, width, layers, 8192, scores) for (width, layers), scores in zip(shapes, rows, strict=True)
    ]


def _lengths(architecture: str, *rows: _Scores) -> list[PublishedScores]:
    lengths = (2048, 4096, 8192, 16384)
    return [_row(architecture, 1536, 32, length, scores) for length, scores in zip(lengths, rows, strict=True)]


def _row(architecture: str, width: int, layers: int, length: int, scores: _Scores) -> PublishedScores:
    csr, wikitext, lambada, niah, scrolls = scores
    return PublishedScores(
        architecture=architecture,
        hidden_size=width,
        num_layers=layers,
        sequence_length=length,
        csr=csr,
        wikitext=wikitext,
        lambada=lambada,
        niah=niah,
        scrolls=scrolls,
    )


TABLE_5 = [
    *_aspect(
        "llama",
        (49.70, 26.2, 13.4, 44.1, 11.01),
        (48.34, 19.8, 13.4, 54.2, 12.45),
        (49.14, 26.5, 12.8, 45.0, 12.20),
        (47.19, 24.8, 16.7, 46.0, 10.88),
    ),
    *_aspect(
        "cosformer2",
        (48.66, 21.3, 15.3, 10.9, 10.88),
        (49.53, 21.0, 14.0, 8.8, 10.31),
        (46.37, 21.2, 15.5, 12.3, 10.75),
        (45.80, 23.4, 18.3, 6.5, 9.85),
    ),
]
"""Aspect ratio: width by layers."""

TABLE_6 = [
    *_lengths(
        "tnl",
        (50.77, 26.4, 10.5, 8.0, 9.02),
        (51.22, 23.9, 10.7, 12.1, 11.79),
        (50.45, 20.6, 11.7, 28.0, 9.65),
        (48.34, 20.6, 11.3, 14.2, 8.74),
    ),
    *_lengths(
        "hgrn2",
        (51.90, 22.2, 10.0, 2.3, 11.60),
        (51.40, 20.9, 10.6, 2.1, 11.46),
        (51.58, 20.3, 10.7, 10.0, 11.08),
        (50.36, 20.1, 11.2, 8.8, 12.23),
    ),
    *_lengths(
        "cosformer2",
        (49.55, 22.7, 12.0, 6.8, 10.93),
        (48.46, 21.3, 12.5, 6.5, 11.79),
        (48.66, 21.3, 15.3, 10.9, 10.88),
        (48.88, 22.1, 16.9, 9.6, 13.04),
    ),
]
"""Length of the training sequences."""
