"""``lightscale reference`` behind its checks: the reference on its ranks, and the store."""

import itertools
import sys
from pathlib import Path

from lightscale.config.schema import RunConfig
from lightscale.evaluation.model import mesh_of
from lightscale.training.health.heartbeat import Heartbeat
from lightscale.training.reference_store import write_reference


def write(config: RunConfig, out: Path) -> None:
    """See ``write_reference``. Called by every rank with torchrun's variables, or without them by one process."""
    with mesh_of(config) as mesh:
        heartbeat, counted = Heartbeat(config.restart.hang_timeout_s), itertools.count()
        write_reference(config, out, mesh, advance=lambda: heartbeat.beat("validation", step=next(counted)))
        if mesh.rank == 0:
            print(f"wrote {out}", file=sys.stderr, flush=True)
