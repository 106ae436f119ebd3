"""The faults: each says what it is, how it happens, what must be seen of it, and how it is mended."""
