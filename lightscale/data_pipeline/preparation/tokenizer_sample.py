"""A sample of a corpus of any size to train a tokenizer on: the same in whatever order and units it is read."""

import heapq
from typing import Any

import xxhash

SAMPLE_BYTES = 8_000_000
_EXCERPT_CHARACTERS = 2**16
_SEED = 2


class TextSample:
    """About ``limit_bytes`` of the texts that were added, spread evenly over them, in memory bounded by that.

    Texts are cut into excerpts of 65,536 characters; those with the lowest hashes of (document, offset) are kept. The
    lowest of all are among the lowest of each part, so samples of parts merge to the sample of the whole.
    """

    def __init__(self, limit_bytes: int = SAMPLE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._heap: list[tuple[int, str, str]] = []  # (-hash, name, text): the excerpt with the highest hash is on top
        self._kept_bytes, self._ceiling = 0, 2**64

    def add(self, document_id: str, text: str) -> None:
        """Consider all of a document."""
        for start in range(0, len(text), _EXCERPT_CHARACTERS):
            self._add_excerpt(f"{document_id}#{start}", text[start : start + _EXCERPT_CHARACTERS])

    def merge(self, found: dict[str, Any]) -> None:
        """Merge another sample, in the form of ``as_json``."""
        self._ceiling = min(self._ceiling, found["ceiling"])
        for name, text in found["excerpts"]:
            self._add_excerpt(name, text)

    def _add_excerpt(self, name: str, text: str) -> None:
        digest = xxhash.xxh3_64_intdigest(name.encode(), seed=_SEED)
        if digest >= self._ceiling:
            return
        heapq.heappush(self._heap, (-digest, name, text))
        self._kept_bytes += len(text.encode())
        while self._kept_bytes > self._limit_bytes and len(self._heap) > 1:
            highest, _, dropped = heapq.heappop(self._heap)
            self._ceiling = -highest
            self._kept_bytes -= len(dropped.encode())

    def excerpts(self) -> list[tuple[str, str]]:
        """(name, text) of the excerpts that are kept, by their hashes."""
        ascending = sorted(self._heap, reverse=True)
        return [(name, text) for negative, name, text in ascending if -negative < self._ceiling]

    def as_json(self) -> dict[str, Any]:
        """Plain values. ``ceiling``: the lowest hash without room; none above it may stay in a merged sample."""
        return {"ceiling": self._ceiling, "excerpts": self.excerpts()}
