"""Computation in 8 bits, which lightscale does not ask for.

Megatron imports the class at start. Without the rest of this module it takes none of Transformer Engine's layers.
"""


class FP8GlobalStateManager:
    """Scales of 8-bit numbers, of which there are none."""
