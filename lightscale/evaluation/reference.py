"""``lightscale reference`` behind its checks: the reference on its ranks, and the store."""

import sys
from pathlib import Path

from lightscale.config.schema import RunConfig
from lightscale.evaluation.model import mesh_of
from lightscale.training.reference_store import write_reference


def write(config: RunConfig, out: Path) -> None:
    """See ``write_reference``. Called by every rank with torchrun's variables, or without them by one process."""
    with mesh_of(config) as mesh:
        write_reference(config, out, mesh)
        if mesh.rank == 0:
            print(f"wrote {out}", file=sys.stderr, flush=True)
