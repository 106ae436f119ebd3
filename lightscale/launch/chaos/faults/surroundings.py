"""Network, disk, store and clock that go wrong for launcher and ranks, through the preloaded library."""

import random
from dataclasses import dataclass

from lightscale.launch.chaos.harness.trial import Bound, Runner
from lightscale.launch.chaos.preload.control import OTHERS


@dataclass(frozen=True, kw_only=True)
class Way:
    """How one number goes wrong."""

    field: str
    """One of `FIELDS` of the library."""
    low: float
    high: float
    """Its value is drawn from these two on."""
    ranks: str
    """all: with the launcher; one: one rank; any: one or all."""
    bound: Bound
    hinders_starts: bool = False


# What only slows a run costs no step; what may take longer than a hang costs a restart.
_SLOW, _RESTART = Bound(saves=0, seconds=30), Bound(saves=2, seconds=120)
SURROUNDINGS = {
    "slow network": Way(field="send_pause_s", low=0.001, high=0.01, ranks="any", bound=_RESTART),
    "network loss in one direction": Way(field="send_stall", low=1, high=1, ranks="one", bound=_RESTART),
    "slow file system": Way(field="write_pause_s", low=0.005, high=0.1, ranks="any", bound=_RESTART),
    "read-only file system": Way(
        field="read_only", low=1, high=1, ranks="all", bound=Bound(saves=6, seconds=120), hinders_starts=True
    ),
    # A start compares the clocks of its ranks.
    "clock jump": Way(field="clock_offset_s", low=-90_000, high=90_000, ranks="any", bound=_SLOW, hinders_starts=True),
    "stuck data host": Way(field="read_stall", low=1, high=1, ranks="any", bound=_RESTART, hinders_starts=True),
}


@dataclass(frozen=True, kw_only=True)
class Surrounding:
    """One of `SURROUNDINGS` goes wrong."""

    kind: str
    value: float
    rank: int | None
    """None: all ranks, and the launcher."""

    @property
    def bound(self) -> Bound:
        """The most that it may cost."""
        return SURROUNDINGS[self.kind].bound

    @property
    def hinders_starts(self) -> bool:
        """Whether a user would mend it before the command is started by hand."""
        return SURROUNDINGS[self.kind].hinders_starts

    @property
    def stops_the_run(self) -> bool:
        """Whether there may be no step before it ends."""
        return SURROUNDINGS[self.kind].field in ("send_stall", "read_stall", "read_only")

    def begin(self, run: Runner) -> None:
        """Let it go wrong."""
        self._set(run, self.value)

    def end(self, run: Runner) -> None:
        """Mend it."""
        self._set(run, 0.0)

    def _set(self, run: Runner, value: float) -> None:
        assert run.subject.control is not None, "the campaign tries this where the library can be built"
        rows = [*range(run.subject.processes), OTHERS] if self.rank is None else [self.rank]
        run.subject.control.set(SURROUNDINGS[self.kind].field, value, rows)


def draw_surrounding(generator: random.Random, name: str, processes: int) -> Surrounding:
    """Draw the value, and who is hit."""
    way = SURROUNDINGS[name]
    is_one = way.ranks == "one" or (way.ranks == "any" and generator.random() < 0.5)
    return Surrounding(
        kind=name,
        value=generator.uniform(way.low, way.high),
        rank=generator.randrange(processes) if is_one else None,
    )
