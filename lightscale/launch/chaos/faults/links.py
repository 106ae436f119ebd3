"""Links of hosts that go wrong for a while."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from lightscale.launch.chaos.harness.hosts import Host, NamespaceHost
from lightscale.launch.chaos.harness.trial import Bound, Condition, Runner
from lightscale.runs.repeated import Repeated

LONGEST_S = 60.0
"""Longest time that a link goes wrong: also for longer than ranks wait for each other."""
_FLAP_S = 2.0


@dataclass(frozen=True, kw_only=True)
class LinkWay:
    """How the link of a host goes wrong."""

    begin: Callable[[NamespaceHost, Sequence[Host], float], None]
    """Of the host, for the others, by the value that is drawn."""
    end: Callable[[NamespaceHost, Sequence[Host]], None]
    low: float = 0.0
    high: float = 0.0
    stops_the_run: bool = True


WAYS = {
    # Mbit/s. A gradient of the smallest models takes a second at the lower one.
    "slow link": LinkWay(
        begin=lambda host, others, value: host.slow(value),
        end=lambda host, others: host.slow(None),
        low=4.0,
        high=40.0,
        stops_the_run=False,
    ),
    "link loss in one direction": LinkWay(
        begin=lambda host, others, value: host.lose(others, is_on=True),
        end=lambda host, others: host.lose(others, is_on=False),
    ),
    "link cut": LinkWay(
        begin=lambda host, others, value: host.set_link(is_up=False), end=lambda host, others: host.set_link(is_up=True)
    ),
}


@dataclass(frozen=True, kw_only=True)
class LinkCondition:
    """The link of the host of `rank` goes wrong in one of `WAYS`."""

    kind: str
    rank: int
    value: float
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)

    @property
    def hinders_starts(self) -> bool:
        """Whether a user would mend it before the command is started by hand: ranks could not meet."""
        return WAYS[self.kind].stops_the_run

    @property
    def stops_the_run(self) -> bool:
        """Whether there may be no step before it ends."""
        return WAYS[self.kind].stops_the_run

    def begin(self, run: Runner) -> None:
        """Let it go wrong."""
        WAYS[self.kind].begin(*run.link(self.rank), self.value)

    def end(self, run: Runner) -> None:
        """Mend it."""
        WAYS[self.kind].end(*run.link(self.rank))


@dataclass(kw_only=True, eq=False)
class FlappingLink:
    """The link of the host of `rank` is down for a part of every two seconds."""

    rank: int
    down_s: float
    kind: ClassVar[str] = "flapping link"
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)
    hinders_starts: ClassVar[bool] = False
    stops_the_run: ClassVar[bool] = False
    _flapping: Repeated | None = field(default=None, repr=False)

    def begin(self, run: Runner) -> None:
        """Take it down and up, again and again."""
        host, _ = run.link(self.rank)

        def flap() -> None:
            host.set_link(is_up=False)
            time.sleep(self.down_s)
            host.set_link(is_up=True)

        self._flapping = Repeated(flap, period_s=_FLAP_S - self.down_s, name="flapping link")
        self._flapping.start()

    def end(self, run: Runner) -> None:
        """Leave it up."""
        assert self._flapping is not None, "it has begun"
        self._flapping.stop()


def _way(kind: str) -> Callable[[random.Random, int], Condition]:
    def draw(generator: random.Random, processes: int) -> Condition:
        value = generator.uniform(WAYS[kind].low, WAYS[kind].high)
        return LinkCondition(kind=kind, rank=generator.randrange(processes), value=value)

    return draw


def _flapping(generator: random.Random, processes: int) -> Condition:
    return FlappingLink(rank=generator.randrange(processes), down_s=generator.uniform(0.2, 1.0))


LINKS: dict[str, Callable[[random.Random, int], Condition]] = {
    **{kind: _way(kind) for kind in WAYS},
    FlappingLink.kind: _flapping,
}
