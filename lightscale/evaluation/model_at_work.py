"""Common part of commands that use a model on ranks: heartbeats for the launcher, and notes of rank 0 on stderr."""

import sys

from lightscale.evaluation.chosen_run import ChosenRun
from lightscale.evaluation.model import LoadedModel
from lightscale.parallel.mesh import Mesh
from lightscale.training.health.heartbeat import Heartbeat


class ModelAtWork:
    """A model and its ranks; collective over those of ``mesh``."""

    def __init__(self, chosen: ChosenRun, loaded: LoadedModel, mesh: Mesh) -> None:
        self.loaded, self.mesh = loaded, mesh
        self._heartbeat, self._steps = Heartbeat(chosen.config.restart.hang_timeout_s), 0
        self._is_main = mesh.rank == 0
        self.advance()
        for reason in loaded.refused:
            self._say(f"skipped a damaged checkpoint: {reason}")

    def _say(self, text: str) -> None:
        if self._is_main:
            print(text, file=sys.stderr, flush=True)

    def advance(self) -> None:
        """Say to the launcher that this rank goes on."""
        self._steps += 1
        # An activity that may take long: nobody knows how long prompts and documents are.
        self._heartbeat.beat("validation", step=self._steps)
