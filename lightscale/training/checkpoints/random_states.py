"""The generators of a process as plain values, which JSON keeps exactly."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightscale.training.checkpoints.reading import DamagedCheckpoint, shown


def seed_generators(seed: int, rank: int) -> None:
    """Give ``rank`` separate random streams, which only ``seed`` and ``rank`` decide."""
    # Seeded by text, so that no two pairs of seed and rank meet, as seed + rank would.
    own = random.Random(f"{seed} {rank}")
    random.seed(own.getrandbits(64))
    np.random.seed(own.getrandbits(32))
    # The GPU's too.
    torch.manual_seed(own.getrandbits(63))


def random_states() -> dict[str, Any]:
    """Every generator of this process: Python's, NumPy's global one (libraries draw from it), PyTorch's, the GPU's."""
    version, keys, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    name, vector, position, has_gauss, cached = numpy_state
    states: dict[str, Any] = {
        "torch": _hex(torch.get_rng_state()),
        "python": [version, list(keys), gauss],
        "numpy": [str(name), vector.tolist(), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available():
        states["cuda"] = _hex(torch.cuda.get_rng_state())
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set every generator to the states that ``random_states`` returned."""
    torch.set_rng_state(_tensor(states["torch"]))
    version, keys, gauss = states["python"]
    # JSON has made a list of it, which setstate does not take.
    random.setstate((version, tuple(keys), gauss))
    name, vector, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(vector, dtype=np.uint32), position, has_gauss, cached))
    # A checkpoint that was written on CPUs has none; the GPU then keeps its seed.
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(_tensor(states["cuda"]))


def check_random_states(states: dict[str, Any], path: Path) -> None:
    """Refuse states, of the file ``path``, that ``set_random_states`` could not set; sets none."""
    try:
        # Generators of their own take them as those of the process will; types and lengths are the reader's.
        torch.Generator().set_state(_tensor(states["torch"]))
        version, keys, gauss = states["python"]
        random.Random().setstate((version, tuple(keys), gauss))
        name, vector, position, has_gauss, cached = states["numpy"]
        np.random.RandomState().set_state((name, np.array(vector, dtype=np.uint32), position, has_gauss, cached))
        if torch.cuda.is_available() and "cuda" in states:
            torch.Generator("cuda").set_state(_tensor(states["cuda"]))
    except (RuntimeError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: not a generator state: {shown(str(error))}") from None


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
