"""The finalizer of SplitMix64 (Steele et al. 2014): mixes bits, the same on every machine and in every version."""

import numpy as np
from numpy.typing import NDArray


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of the 64-bit values whose every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))
