"""Extents of the kernels of log-sums."""

CHUNK = 64
"""Tokens of a chunk, whose sum is added to the entering sum."""

CHANNELS = 128
"""Channels of a program: one per thread."""

LEAST_SPLIT_TOKENS = 256
"""Least tokens of a split."""

MOST_SPLITS = 64
"""Most splits of all rows. A program takes its tokens one after the other, so many programs must run side by side."""
