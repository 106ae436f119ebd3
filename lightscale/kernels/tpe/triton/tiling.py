"""Tiles of the Triton kernels of the scan; docs/reference/operators/tpe.md, "In Triton", gives the reasons."""

STEP = 16
"""Tokens of one step: the least of a matrix product."""

CHANNELS = 16
"""Channels of one program: tiles of states (E, channels) are held in registers."""

PARAMETER_MODES = 64
"""Most modes of a program of the parameters' gradients, which has four tiles of states."""
