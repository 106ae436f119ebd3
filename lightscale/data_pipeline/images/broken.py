"""Images that cannot be decoded."""

from dataclasses import dataclass

BROKEN = "broken image"
"""The reason under which they are counted."""


@dataclass(frozen=True, kw_only=True)
class Broken:
    """An image that cannot be decoded."""

    reason: str
