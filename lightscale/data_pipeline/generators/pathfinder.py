"""Pathfinder: an image, pixel after pixel, in which two marks stand at the ends of one dashed path, or of two.

    joined: both marks at the ends of one path; apart: each at an end of another

(Linsley et al. 2018, arXiv 1805.08315, section 4; as a sequence of pixels in Long Range Arena, arXiv 2011.04006,
section 2.4: 32 x 32 pixels are 1,024 tokens; Path-X has 128 x 128, 16,384 tokens.) The rules are theirs: two long
paths and shorter distractors of dashes, each turned by a small random angle from the one before, that keep a distance
from each other. The images are not theirs: sizes are shares of the image's side, and in every image the ends of one
path are as far from each other as two ends of different paths, so that the distance of the marks says nothing.

    traced: one mark at an end of a long path; the class is where its other end is, seen from the mark

A share of such images is ours too. Whether marks are joined is one bit, which depends on all of a path: a model finds
nothing to begin with. Where a path leads is learned bit by bit, from its first dash on.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.generators.interface import (
    Generator,
    MadeDocument,
    integer,
    require_range,
)
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.data_pipeline.tokenizers.symbols import SHADES, shade_tokenizer
from lightscale.errors import UserError

_MOST_TRIES, _MOST_STARTS, _MOST_TURNS = 500, 20, 6
# Shares of the image's side.
_DASH, _GAP, _THICKNESS, _MARK, _CLEARANCE, _MARGIN = 0.035, 0.02, 0.028, 0.045, 0.08, 0.05
_ALIKE = 0.02
"""Most difference between the marks' distances if they are joined and if they are not."""
_DIRECTIONS, _RINGS, _RING = 16, 5, 0.16
"""Of the end of a traced path, seen from its mark: directions and distances; a ring's width, the last is open."""
_GRAIN = 1024
"""Points lie on a grid of so many places a pixel: the last digits of sines differ between machines."""

Point = tuple[float, float]
Path = list[Point]
"""The middles of its dashes' ends: one more than it has dashes."""


@dataclass(frozen=True, kw_only=True)
class Pathfinder(Generator):
    """Images of ``side`` x ``side`` pixels, row by row."""

    side: int = 32
    contour_length: int = 14
    """Dashes of each of the two long paths; distractors have a third."""
    distractors: int = 4
    curvature: float = 0.5
    """Most of the angle between two dashes, in radians."""

    traced: float = 0.0
    """Share of images with one mark, classified by the place of the path's other end."""

    help = "generate Pathfinder: images by pixels, classified by whether a path joins two marks"
    has_images = True

    def __post_init__(self) -> None:
        require_range("side", self.side, 16, 256)
        require_range("contour-length", self.contour_length, 3, 100)
        require_range("distractors", self.distractors, 0, 100)
        if not 0 <= self.curvature <= math.pi:
            raise UserError(f"--curvature {self.curvature}: must be 0 to 3.14")
        if not 0 <= self.traced <= 1:
            raise UserError(f"--traced {self.traced}: must be 0 to 1")

    @property
    def classes(self) -> Sequence[str]:
        """See ``Generator``: two; if paths are traced, then also each place of an end."""
        places = [f"ends-{direction}-{ring}" for ring in range(_RINGS) for direction in range(_DIRECTIONS)]
        return ["apart", "joined", *(places if self.traced else ())]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """See ``Generator``."""
        return self.side, self.side, 1

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """See ``Generator``."""
        add = parser.add_argument
        side = "height and width in pixels, whose product is the tokens: 32; 128 is Path-X (default: 32)"
        add("--side", type=int, default=32, metavar="N", help=side)
        add("--contour-length", type=int, default=14, metavar="N", help="dashes of a path (default: 14)")
        add("--distractors", type=int, default=4, metavar="N", help="shorter paths without marks (default: 4)")
        add("--curvature", type=float, default=0.5, metavar="X", help="most turn of a dash in radians (default: 0.5)")
        traced = "share of images with one mark, classified by where its path ends, to learn from (default: 0)"
        add("--traced", type=float, default=0.0, metavar="SHARE", help=traced)

    def tokenizer(self) -> TiktokenTokenizer:
        """A token for each of 256 shades."""
        return shade_tokenizer("pathfinder")

    def make(self, random: Random) -> MadeDocument:
        """See ``Generator``. ``UserError`` where hardly any image has room for the paths."""
        # Without traced paths no number is taken: their images are those of earlier versions.
        if self.traced and random.random() < self.traced:
            paths, ends = self.paths(random, is_joined=True)
            mark, end = ends if integer(random, 0, 1) else ends[::-1]
            pixels, label = drawn(self.side, paths, [mark]), 2 + _place(mark, end, self.side)
        else:
            label = integer(random, 0, 1)
            pixels = drawn(self.side, *self.paths(random, is_joined=label == 1))
        text = "".join(SHADES[value] for value in pixels.ravel().tolist())
        return MadeDocument(text=text, label=label, pixels=pixels[..., None])

    def paths(self, random: Random, *, is_joined: bool) -> tuple[list[Path], tuple[Point, Point]]:
        """The two long paths, then the distractors; and where the marks are."""
        for _ in range(_MOST_TRIES):
            found = self._paths(random, [self.contour_length] * 2, [])
            if len(found) < 2:
                continue
            joined, apart = self._marks(*found)
            # Discs that touch would join two paths.
            if _apart(*joined) < 3 * _MARK * self.side or abs(_apart(*joined) - _apart(*apart)) > _ALIKE * self.side:
                continue
            found = self._paths(random, [max(2, self.contour_length // 3)] * self.distractors, found)
            if len(found) == 2 + self.distractors:
                return found, joined if is_joined else apart
        raise UserError(
            f"--side {self.side}: none of {_MOST_TRIES} images has room for --contour-length {self.contour_length} and "
            f"--distractors {self.distractors}; use shorter or fewer paths"
        )

    def _paths(self, random: Random, lengths: Sequence[int], found: Sequence[Path]) -> list[Path]:
        """``found`` and paths of so many dashes each; fewer where one has no place."""
        paths = list(found)
        for length in lengths:
            path = self._path(random, length, paths)
            if path is None:
                break
            paths.append(path)
        return paths

    def _marks(self, first: Path, second: Path) -> tuple[tuple[Point, Point], tuple[Point, Point]]:
        """Both ends of ``first``; and an end of each path, whose distance is nearest to theirs."""
        joined = first[0], first[-1]
        pairs = [(one, other) for one in joined for other in (second[0], second[-1])]
        return joined, min(pairs, key=lambda pair: abs(_apart(*pair) - _apart(*joined)))

    def _path(self, random: Random, length: int, others: Sequence[Path]) -> Path | None:
        """A path of so many dashes apart from the others; None: no place was found."""
        for _ in range(_MOST_STARTS):
            angle = 2 * math.pi * random.random()
            path: Path = [(self._place(random), self._place(random))]
            if not self._is_free(path[0], [], others):
                continue
            while len(path) <= length and (found := self._next(random, path, angle, others)) is not None:
                point, angle = found
                path.append(point)
            if len(path) > length:
                return path
        return None

    def _next(self, random: Random, path: Path, angle: float, others: Sequence[Path]) -> tuple[Point, float] | None:
        """The end of the next dash and its direction, after the direction ``angle``; None: no turn leads to a place."""
        step, (x, y) = (_DASH + _GAP) * self.side, path[-1]
        for _ in range(_MOST_TURNS):
            turned = angle + self.curvature * (2 * random.random() - 1)
            point = _on_grid(x + step * math.cos(turned)), _on_grid(y + step * math.sin(turned))
            if self._is_free(point, path, others):
                return point, turned
        return None

    def _place(self, random: Random) -> float:
        margin = _MARGIN * self.side
        return _on_grid(margin + random.random() * (self.side - 2 * margin))

    def _is_free(self, point: Point, path: Path, others: Sequence[Path]) -> bool:
        """Inside, and apart from other paths and from the earlier parts of its own."""
        least, margin = _CLEARANCE * self.side, _MARGIN * self.side
        if not all(margin <= one <= self.side - margin for one in point):
            return False
        near = [one for other in others for one in other] + path[:-2]
        return all(_apart(point, one) >= least for one in near)


def drawn(side: int, paths: Sequence[Path], marks: Sequence[Point]) -> NDArray[np.uint8]:
    """(side, side): white dashes and discs on black, with soft edges of a pixel."""
    y, x = np.mgrid[:side, :side] + 0.5
    shade, share = np.zeros((side, side)), _DASH / (_DASH + _GAP)
    for path in paths:
        for (x0, y0), (x1, y1) in pairwise(path):
            dx, dy = share * (x1 - x0), share * (y1 - y0)
            along = np.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0, 1)
            distance = np.sqrt((x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2)
            shade = np.maximum(shade, _THICKNESS * side / 2 + 0.5 - distance)
    for x0, y0 in marks:
        shade = np.maximum(shade, _MARK * side + 0.5 - np.sqrt((x - x0) ** 2 + (y - y0) ** 2))
    return (np.clip(shade, 0, 1) * 255).round().astype(np.uint8)


def _place(mark: Point, end: Point, side: int) -> int:
    """Number of the place of ``end`` seen from ``mark``: in each ring, the directions from east over south."""
    x, y = end[0] - mark[0], end[1] - mark[1]
    direction = int(math.atan2(y, x) % (2 * math.pi) / (2 * math.pi) * _DIRECTIONS) % _DIRECTIONS
    return min(int(_apart(mark, end) / (_RING * side)), _RINGS - 1) * _DIRECTIONS + direction


def _on_grid(x: float) -> float:
    return round(x * _GRAIN) / _GRAIN


def _apart(one: Point, other: Point) -> float:
    return math.sqrt((one[0] - other[0]) ** 2 + (one[1] - other[1]) ** 2)
