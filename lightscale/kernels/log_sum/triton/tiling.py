"""Extents of the kernels of log-sums."""

CHUNK = 64
"""Tokens that are added up by themselves."""

CHANNELS = 128
"""Of a program: one to a thread."""

LEAST_SPLIT_TOKENS = 256
"""Of a row."""

MOST_SPLITS = 64
"""Of all rows: a program goes from token to token, so that many must do so side by side."""
