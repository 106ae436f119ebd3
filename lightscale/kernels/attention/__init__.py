"""Softmax attention within the documents of packed rows; docs/reference/operators/attention.md lists its forms."""

from lightscale.kernels.attention.documents import (
    DocumentAttention,
    DocumentStarts,
    leading_tokens,
    read_starts,
    sdpa,
    to_device,
)
from lightscale.kernels.attention.flash_parts import add_gradients, add_keys
from lightscale.kernels.attention.tiled import KeyRanges, masked_attention

__all__ = [
    "DocumentAttention",
    "DocumentStarts",
    "KeyRanges",
    "add_gradients",
    "add_keys",
    "leading_tokens",
    "masked_attention",
    "read_starts",
    "sdpa",
    "to_device",
]
