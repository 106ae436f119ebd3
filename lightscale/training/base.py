"""The frozen weights of a run, beside adapters or of a reference: read at every start, recorded in its checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.engine import Engine
from lightscale.runs.base import base_run
from lightscale.training.checkpoints.manifest import NAME as MANIFEST
from lightscale.training.checkpoints.manifest import hash_file
from lightscale.training.checkpoints.restore import Checkpoints, Restored


@dataclass(frozen=True, kw_only=True)
class Base:
    """The checkpoint with a run's frozen weights."""

    checkpoint: Path
    step: int
    manifest: str
    """The hash of its manifest, which has those of all its files."""

    def fact(self) -> dict[str, Any]:
        """As manifests of adapters have it."""
        return {"checkpoint": str(self.checkpoint), "step": self.step, "manifest": self.manifest}

    def check(self, path: Path, recorded: Mapping[str, Any] | None) -> None:
        """UserError if ``recorded``, the fact in the manifest of ``path``, is of another checkpoint, or none."""
        if recorded is None or recorded["manifest"] != self.manifest:
            there = "none" if recorded is None else f"{recorded['checkpoint']} ({recorded['manifest'][:16]}…)"
            raise UserError(
                f"{path} was trained beside another frozen model: {there}, and train.init_from names "
                f"{self.checkpoint} ({self.manifest[:16]}…); use the one that it was trained beside, or start a new run"
            )


def read_base(config: RunConfig, engine: Engine) -> tuple[Base, Restored]:
    """Read the frozen weights of ``engine``, or all of an engine that is only a reference; collective over its ranks.

    UserError if the checkpoint is missing or damaged, or is of another model.
    """
    directory, step = base_run(config)
    ranks = Agreement(engine.mesh.control)
    try:
        restored = Checkpoints(directory.checkpoints, engine.mesh, parts=["data"]).restore(
            engine, step=step, weights_only=True, frozen=config.adapters is not None
        )
        assert restored is not None, "the checkpoint is missing"
        manifest = ranks.on_first(lambda: hash_file(restored.path / MANIFEST).xxh3_128)
    except UserError as error:
        raise UserError(f'train.init_from = "{directory.path}@{step}": {error}') from None
    return Base(checkpoint=restored.path, step=step, manifest=manifest), restored
