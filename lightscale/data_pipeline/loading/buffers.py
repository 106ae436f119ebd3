"""Memory that is reused after its last reference is gone."""

import math
import sys
import threading

import numpy as np
from numpy.typing import NDArray


class Buffers:
    """int32 arrays, each used again when the last view of it and the last tensor over it are gone.

    Arrays are not returned explicitly: the reference count shows when one is free.

    The system hands out fresh memory with a page fault for every 4 KiB, which takes several times longer than to fill
    it with tokens. As many arrays are kept as were held at once. Several threads may take.
    """

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.int32]] = []
        self._lock = threading.Lock()

    def take(self, *shape: int) -> NDArray[np.int32]:
        """An array of ``shape`` with any content."""
        size = math.prod(shape)
        with self._lock:
            free = [index for index in range(len(self._arrays)) if _references(self._arrays, index) == _UNUSED]
            for index in free:
                if len(self._arrays[index]) == size:
                    return self._arrays[index].reshape(shape)
            # Sizes change where a run comes to its next curriculum stage: what is free and of another size is let go.
            for index in reversed(free):
                del self._arrays[index]
            self._arrays.append(np.empty(size, dtype=np.int32))
            return self._arrays[-1].reshape(shape)


def _references(arrays: list[NDArray[np.int32]], index: int) -> int:
    return sys.getrefcount(arrays[index])


_UNUSED = _references([np.empty(0, dtype=np.int32)], 0)
"""Result of ``_references`` for an array that only its list holds; versions of Python differ."""
