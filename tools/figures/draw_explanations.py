#!/usr/bin/env python
"""The figures of ``docs/explanation``: ``python tools/figures/draw_explanations.py [FOLDER]``, an SVG for each.

Plain SVG without a background, in colours that are read on white and on black. The same text gives the same files.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from lightscale.config.files import load
from lightscale.config.model import ModelConfig
from lightscale.models.flops import training_flops_per_token
from lightscale.models.registry import mixer_spec

ROOT = Path(__file__).resolve().parents[2]
INK = "#7a828c"
GREY, BLUE, GREEN, ORANGE, PURPLE = "#5f6873", "#3a6ea5", "#2f7d5b", "#b3611f", "#7b5ea7"
"""Of boxes, whose text is white."""
LENGTHS = [2**power for power in range(11, 23)]
SEQUENCE_RANKS = 8


class Drawing:
    """An SVG that grows."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="Helvetica, Arial, sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>',
        ]

    def text(self, x: float, y: float, words: str, *, anchor: str = "middle", size: int = 13, fill: str = INK) -> None:
        """Lines of ``words``, the first one's middle at ``y``."""
        for number, line in enumerate(words.split("\n")):
            self.parts.append(
                f'<text x="{x:g}" y="{y + number * (size + 4):g}" font-size="{size}" fill="{fill}" '
                f'text-anchor="{anchor}" dominant-baseline="central">{escape(line)}</text>'
            )

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", *, fill: str = GREY, size: int = 13
    ) -> None:
        """A filled box with ``words`` in its middle."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}"/>')
        if words:
            top = y + height / 2 - words.count("\n") * (size + 4) / 2
            self.text(x + width / 2, top, words, size=size, fill="#ffffff")

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """A dashed frame."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="none" stroke="{INK}" '
            'stroke-dasharray="4 4"/>'
        )

    def path(self, points: Sequence[tuple[float, float]], *, colour: str = INK, width: float = 1.5) -> None:
        """A line through ``points``."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """From the first point to the second."""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )

    def triangle(self, x: float, y: float, cells: int, side: float, *, fill: str = BLUE) -> None:
        """The lower triangle of a matrix of ``cells`` x ``cells``."""
        for row in range(cells):
            for column in range(row + 1):
                self.box(x + column * side, y + row * side, side - 2, side - 2, fill=fill)

    def finished(self) -> str:
        """The file."""
        return "\n".join([*self.parts, "</svg>\n"])


def states() -> Drawing:
    """Softmax attention beside a state."""
    drawing = Drawing(760, 300, "Softmax attention reads all earlier keys; linear attention reads one state")
    drawing.text(150, 20, "softmax attention", size=15)
    drawing.triangle(60, 50, 6, 30)
    drawing.text(150, 250, "each query reads all earlier keys:\nthe cache grows with the context")
    drawing.text(530, 20, "linear attention", size=15)
    for token in range(4):
        x = 350 + token * 105
        drawing.box(x, 110, 70, 50, f"S{'₁₂₃₄'[token]}", fill=ORANGE, size=15)
        drawing.text(x + 35, 72, f"o{'₁₂₃₄'[token]} = S{'₁₂₃₄'[token]}ᵀ q{'₁₂₃₄'[token]}")
        drawing.arrow(x + 35, 108, x + 35, 84)
        drawing.text(x + 35, 202, f"k{'₁₂₃₄'[token]} v{'₁₂₃₄'[token]}ᵀ")
        drawing.arrow(x + 35, 190, x + 35, 163)
        drawing.arrow(x - 32, 135, x - 3, 135)
    drawing.text(530, 250, "each query reads one matrix:\nits size does not depend on the context")
    return drawing


def chunks() -> Drawing:
    """The full matrix beside chunks with states."""
    drawing = Drawing(760, 310, "Scores of all pairs, and scores inside chunks with states between them")
    drawing.text(140, 20, "all pairs: n² scores", size=15)
    drawing.triangle(30, 45, 12, 18)
    drawing.text(140, 285, "12 tokens, 78 pairs")
    drawing.text(530, 20, "chunks of C tokens: n C scores, n / C states", size=15)
    for chunk in range(3):
        x = 340 + chunk * 140
        drawing.triangle(x, 60, 4, 20)
        drawing.text(x + 40, 160, f"chunk {chunk + 1}")
        drawing.box(x, 185, 80, 36, f"S{'₁₂₃'[chunk]}", fill=ORANGE, size=15)
        drawing.arrow(x + 40, 172, x + 40, 183)
        if chunk < 2:
            drawing.arrow(x + 80, 203, x + 138, 203)
            drawing.arrow(x + 82, 190, x + 134, 130)
    drawing.text(
        530, 255, "inside a chunk: products of matrices\nbetween chunks: one state, read by all queries of the next"
    )
    return drawing


def _ranks(drawing: Drawing, y: float, places: Sequence[float], width: float) -> None:
    for rank, x in enumerate(places):
        drawing.box(x, y, width, 34, f"rank {rank}: its tokens", fill=GREY)
        drawing.box(x, y + 60, width, 34, f"(D{'₀₁₂₃'[rank]}, S{'₀₁₂₃'[rank]})", fill=BLUE)
        drawing.arrow(x + width / 2, y + 34, x + width / 2, y + 58)


ENTERING = ("zero", "S₀", "D₁ S₀ + S₁", "D₂ (D₁ S₀ + S₁) + S₂")


def gather() -> Drawing:
    """All summaries to all ranks at once."""
    drawing = Drawing(760, 290, "gather: one all-gather of summaries, then each rank folds those before it")
    places, width = (10, 200, 390, 580), 170
    _ranks(drawing, 10, places, width)
    drawing.box(10, 140, 740, 36, "one all-gather: every rank receives all summaries", fill=PURPLE)
    for rank, x in enumerate(places):
        drawing.arrow(x + width / 2, 104, x + width / 2, 138)
        drawing.arrow(x + width / 2, 176, x + width / 2, 208)
        drawing.box(x, 210, width, 34, ENTERING[rank], fill=ORANGE)
    drawing.text(380, 268, "the state that enters each rank: a fold of the summaries before it")
    return drawing


def two_level() -> Drawing:
    """In the node, between nodes, in the node."""
    drawing = Drawing(760, 440, "two_level: gathers in the node, between nodes, and in the node again")
    places, width = (20, 200, 400, 580), 160
    for node, x in enumerate((5, 385)):
        drawing.frame(x, 4, 370, 400)
        drawing.text(x + 185, 22, f"node {node}", size=14)
    _ranks(drawing, 40, places, width)
    for x in (20, 400):
        drawing.box(x, 160, 340, 34, "1: gather in the node: P", fill=PURPLE)
        drawing.box(x, 280, 340, 34, "3: gather in the node: P / g", fill=PURPLE)
    drawing.box(20, 220, 720, 34, "2: gather between nodes: each rank sends 1 / g of the heads, P / g", fill=GREEN)
    for rank, x in enumerate(places):
        middle = x + width / 2
        for start, end in ((134, 158), (194, 218), (254, 278), (314, 338)):
            drawing.arrow(middle, start, middle, end)
        drawing.box(x, 340, width, 34, ENTERING[rank], fill=ORANGE)
    drawing.text(380, 422, "P: a summary; g: ranks of a node (here 2)")
    return drawing


def ring() -> Drawing:
    """From rank to rank."""
    drawing = Drawing(760, 320, "ring: the state goes from rank to rank")
    for rank in range(4):
        y = 20 + rank * 66
        drawing.text(14, y + 18, f"rank {rank}", anchor="start")
        drawing.box(80, y, 110, 36, f"(D{'₀₁₂₃'[rank]}, S{'₀₁₂₃'[rank]})", fill=BLUE)
        x = 230 + rank * 130
        name = "S₀" if not rank else f"D{'₀₁₂₃'[rank]} S + S{'₀₁₂₃'[rank]}"
        drawing.arrow(192, y + 18, x - 2, y + 18)
        drawing.box(x, y, 110, 36, name, fill=ORANGE)
        if rank < 3:
            drawing.path([(x + 110, y + 18), (x + 185, y + 18)])
            drawing.arrow(x + 185, y + 18, x + 185, y + 64)
    drawing.text(440, 300, "time → W - 1 messages, one after the other; each is one state")
    return drawing


def overlap() -> Drawing:
    """The exchange beside projections."""
    drawing = Drawing(760, 210, "The exchange of states runs beside the projections of queries and gate")
    drawing.text(10, 55, "computation", anchor="start")
    drawing.text(10, 135, "exchange", anchor="start")
    spans = ((110, 120, "keys, values", BLUE), (232, 90, "summary", BLUE), (324, 230, "queries, gate", BLUE))
    for x, width, words, fill in spans:
        drawing.box(x, 35, width, 40, words, fill=fill)
    drawing.box(556, 35, 190, 40, "operator: outputs", fill=GREEN)
    drawing.box(336, 115, 190, 40, "states of other ranks", fill=PURPLE)
    drawing.arrow(300, 75, 340, 113)
    drawing.arrow(520, 115, 562, 78)
    drawing.text(430, 185, "time → the exchange has its own stream (on CPUs a thread)")
    return drawing


def parity() -> Drawing:
    """Why layouts agree."""
    drawing = Drawing(760, 330, "Weights, samples and the loss do not depend on the layout")
    same = (
        "initial weights\ndrawn whole, by name",
        "samples\na function of the step",
        "loss\na sum, divided once",
    )
    drawing.text(380, 16, "seed and configuration", size=14)
    for number, words in enumerate(same):
        x = 10 + number * 255
        drawing.box(x, 40, 230, 56, words, fill=GREEN)
        drawing.arrow(x + 115, 26, x + 115, 38)
        drawing.arrow(x + 115, 98, 200 + number * 30, 138)
        drawing.arrow(x + 115, 98, 500 + number * 30, 138)
    drawing.box(120, 140, 220, 60, "1 rank\nwhole tensors, whole rows", fill=GREY)
    drawing.box(420, 140, 220, 60, "N ranks\nshards, segments, states", fill=GREY)
    drawing.arrow(230, 202, 330, 246)
    drawing.arrow(530, 202, 430, 246)
    drawing.box(
        180, 248, 400, 62, "compared, tensor by tensor\nfp64: 1e-10; fp32: loss 1e-6, gradients 1e-5", fill=ORANGE
    )
    return drawing


def data_order() -> Drawing:
    """From a step to documents."""
    drawing = Drawing(760, 330, "The data of a step is a function of a counter")
    first = ("step", "tokens consumed\n+ skipped", "sample index", "source\nby the weights")
    second = ("documents", "window\nn tokens", "permutation\nof the epoch", "number in\nthe source")
    for number, words in enumerate(first):
        drawing.box(10 + number * 190, 20, 150, 52, words, fill=BLUE)
        if number:
            drawing.arrow(10 + number * 190 - 38, 46, 8 + number * 190, 46)
    drawing.arrow(655, 74, 655, 108)
    for number, words in enumerate(second):
        drawing.box(10 + number * 190, 110, 150, 52, words, fill=ORANGE if number == 2 else BLUE)
        if number:
            drawing.arrow(8 + number * 190, 136, 10 + number * 190 - 36, 136)
    drawing.text(380, 195, "nothing above depends on the ranks; the layout cuts the samples of the step last")
    for rank in range(4):
        drawing.box(10 + rank * 190, 225, 150, 40, f"data rank {rank // 2}, part {rank % 2}", fill=GREY)
    drawing.text(380, 300, "2 data ranks with 2 sequence ranks each: rows to the first, parts of rows to the second")
    return drawing


def recovery() -> Drawing:
    """A failure, and what is done again."""
    drawing = Drawing(760, 270, "After a failure a run continues from its newest whole checkpoint")
    unit = 2.1
    left = 80

    def place(step: float) -> float:
        return left + step * unit

    for y, words in ((40, "attempt 1"), (150, "attempt 2")):
        drawing.text(10, y + 15, words, anchor="start")
    drawing.box(place(0), 40, 200 * unit - 2, 30, "kept", fill=GREEN)
    drawing.box(place(200), 40, 60 * unit, 30, "lost", fill=ORANGE)
    drawing.text(place(262), 55, "✕ a rank is killed", anchor="start")
    for step in (0, 100, 200):
        drawing.path([(place(step), 76), (place(step), 96)])
        drawing.text(place(step), 108, "checkpoint" if step else "start")
    drawing.arrow(place(255), 76, place(203), 146)
    drawing.text(place(240), 112, "restart", anchor="start")
    drawing.box(place(200), 150, 60 * unit - 2, 30, "again", fill=BLUE)
    drawing.box(place(260), 150, 55 * unit, 30, "new", fill=GREEN)
    drawing.text(
        380,
        215,
        "repeated steps give the same losses, bit for bit;\na failure costs these steps, and the restart",
    )
    return drawing


def commit() -> Drawing:
    """How a checkpoint comes to exist."""
    drawing = Drawing(760, 190, "A checkpoint appears by one rename")
    steps = (
        ("copy\nto host memory", BLUE),
        ("write step-N.tmp\nhash on the way", GREY),
        ("fsync", GREY),
        ("MANIFEST.json\nsizes, hashes", GREY),
        ("rename to\nstep-N", GREEN),
    )
    for number, (words, fill) in enumerate(steps):
        drawing.box(8 + number * 152, 40, 130, 56, words, fill=fill)
        if number:
            drawing.arrow(8 + number * 152 - 21, 68, 6 + number * 152, 68)
    drawing.text(73, 18, "training waits")
    drawing.text(440, 18, "a thread, beside training")
    drawing.text(440, 125, "a kill here leaves step-N.tmp, which is no checkpoint")
    drawing.text(681, 125, "it exists", fill=INK)
    drawing.text(380, 165, "a reader takes step-N only if every size and hash agrees")
    return drawing


def _chart(
    drawing: Drawing,
    left: float,
    title: str,
    unit: str,
    lines: Sequence[tuple[str, str, Sequence[float]]],
    ticks: Sequence[tuple[float, str]],
) -> None:
    """Lines over ``LENGTHS``, both axes logarithmic."""
    top, bottom, width = 60.0, 260.0, 270.0
    low, high = ticks[0][0], ticks[-1][0]

    def place(length: float, value: float) -> tuple[float, float]:
        across = math.log(length / LENGTHS[0]) / math.log(LENGTHS[-1] / LENGTHS[0])
        up = math.log(value / low) / math.log(high / low)
        return left + across * width, bottom - up * (bottom - top)

    drawing.text(left + width / 2, 18, title, size=14)
    drawing.text(left - 50, 38, unit, anchor="start", size=12)
    drawing.path([(left, top), (left, bottom), (left + width, bottom)])
    for value, words in ticks:
        drawing.text(left - 8, place(LENGTHS[0], value)[1], words, anchor="end", size=12)
    for length, words in ((2**11, "2K"), (2**14, "16K"), (2**17, "128K"), (2**20, "1M"), (2**22, "4M")):
        drawing.text(place(length, low)[0], bottom + 16, words, size=12)
    for name, colour, values in lines:
        points = [place(length, value) for length, value in zip(LENGTHS, values, strict=True)]
        drawing.path(points, colour=colour, width=3)
        x, y = points[-1]
        drawing.text(x - 4, y - 14, name, anchor="end", size=13)
    drawing.text(left + width / 2, bottom + 38, "tokens of context", size=12)


def _exchanged_bytes(model: ModelConfig, length: int) -> float:
    """Of a sequence rank in the second layer forward: its summary in fp32, or its keys and values in bf16."""
    forward, _ = mixer_spec(model.layers[1]).exchange_values(model, 1)
    return 4.0 * forward if forward else 2.0 * 2 * model.hidden_size * length / SEQUENCE_RANKS


def costs() -> Drawing:
    """FLOPs and bytes over the context, counted from two shipped configurations."""
    drawing = Drawing(760, 330, "FLOPs of a token, and bytes of an exchange, over the length of the context")
    models = [(name, colour, load(f"{name}-1b").model) for name, colour in (("tnl", BLUE), ("llama", ORANGE))]
    flops = [
        (f"{name}-1b", colour, [training_flops_per_token(model, length) for length in LENGTHS])
        for name, colour, model in models
    ]
    sent = [
        (f"{name}-1b", colour, [_exchanged_bytes(model, length) for length in LENGTHS])
        for name, colour, model in models
    ]
    _chart(
        drawing,
        70,
        "training",
        "FLOPs per token",
        flops,
        ((1e9, "10⁹"), (1e10, "10¹⁰"), (1e11, "10¹¹"), (1e12, "10¹²"), (1e13, "10¹³")),
    )
    _chart(
        drawing,
        460,
        f"exchange along {SEQUENCE_RANKS} ranks",
        "bytes a rank gives, per layer",
        sent,
        ((1e5, "0.1 MB"), (1e6, "1 MB"), (1e7, "10 MB"), (1e8, "100 MB"), (1e9, "1 GB"), (1e10, "10 GB")),
    )
    drawing.text(380, 318, "counted from the configurations, not measured", size=12)
    return drawing


def cuda_twin() -> Drawing:
    """What is real on the twin, and what is not."""
    drawing = Drawing(760, 320, "The CUDA twin replaces the libraries below PyTorch")
    drawing.text(190, 18, "on a GPU", size=15)
    drawing.text(570, 18, "on the twin", size=15)
    rows = (
        "lightscale: training loop, mixers, kernels",
        "Megatron core: streams, hooks, collectives",
        "PyTorch, CUDA build: allocator, dispatcher",
    )
    for x in (10, 390):
        for number, words in enumerate(rows):
            drawing.box(x, 40 + number * 46, 360, 38, words, fill=BLUE)
    drawing.box(10, 178, 360, 38, "NVIDIA runtime, driver, cuBLAS, NCCL", fill=GREY)
    drawing.box(10, 224, 360, 38, "GPU", fill=GREY)
    drawing.box(390, 178, 175, 84, "null device\naccepts, records,\ncomputes nothing", fill=ORANGE)
    drawing.box(575, 178, 175, 84, "computing twin\nthe same operations\nby CPU kernels", fill=PURPLE)
    drawing.text(477, 285, "launches, waits, bytes,\nraces, peak memory", size=12)
    drawing.text(662, 285, "losses, gradients,\nweights", size=12)
    return drawing


FIGURES: dict[str, Callable[[], Drawing]] = {
    "states": states,
    "chunks": chunks,
    "exchange-gather": gather,
    "exchange-two-level": two_level,
    "exchange-ring": ring,
    "overlap": overlap,
    "parity": parity,
    "data-order": data_order,
    "recovery": recovery,
    "commit": commit,
    "costs": costs,
    "cuda-twin": cuda_twin,
}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "explanation" / "figures")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw().finished(), encoding="utf-8")


if __name__ == "__main__":
    main()
