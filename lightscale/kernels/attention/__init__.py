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
from lightscale.kernels.attention.logits import HeadMaxima, largest_logits
from lightscale.kernels.attention.tiled import KeyRanges, masked_attention

__all__ = [
    "DocumentAttention",
    "DocumentStarts",
    "HeadMaxima",
    "KeyRanges",
    "add_gradients",
    "add_keys",
    "largest_logits",
    "leading_tokens",
    "masked_attention",
    "read_starts",
    "sdpa",
    "to_device",
]
