"""Softmax attention within the documents of packed rows; docs/reference/operators/attention.md has the two ways it is
computed.
"""

from lightscale.kernels.attention.documents import (
    DocumentAttention,
    DocumentStarts,
    leading_tokens,
    read_starts,
    sdpa,
    to_device,
)

__all__ = ["DocumentAttention", "DocumentStarts", "leading_tokens", "read_starts", "sdpa", "to_device"]
