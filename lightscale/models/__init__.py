"""Layers, mixers and the language model built from them."""

import lightscale.parallel  # noqa: F401 - its filters must stand before Megatron is first imported, and warns
