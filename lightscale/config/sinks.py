"""The sinks that ``metrics.sinks`` can name, and where each is implemented.

As for mixers, entries are import strings: reading a configuration waits neither for TensorBoard nor for wandb. A sink
is imported where it is opened (``lightscale.runs.metrics.registry``), on rank 0 only.

Other packages add sinks without a change here, by entry points of the group ``lightscale.sinks``::

    [project.entry-points."lightscale.sinks"]
    mysink = "mypackage:MySink"  # a lightscale.runs.metrics.sink.Sink
"""

import difflib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points

from lightscale.errors import UserError

ENTRY_POINT_GROUP = "lightscale.sinks"


@dataclass(frozen=True, kw_only=True)
class SinkEntry:
    """Where a sink is found, and what can be said of it without importing it."""

    cls: str
    """As "module:name", a subclass of ``lightscale.runs.metrics.sink.Sink``."""
    needs: str | None = None
    """A package that must be installed for it, which the extra of the same name brings."""
    is_record: bool = False
    """Whether other commands read what it writes: it is written by the thread that trains, in time for them."""


_MODULES = "lightscale.runs.metrics"

RECORD = "jsonl"
SINKS: dict[str, SinkEntry] = {
    RECORD: SinkEntry(cls=f"{_MODULES}.jsonl:JsonlSink", is_record=True),
    "tensorboard": SinkEntry(cls=f"{_MODULES}.tensorboard:TensorboardSink"),
    "wandb": SinkEntry(cls=f"{_MODULES}.wandb:WandbSink", needs="wandb"),
}
"""The built-in ones. An entry point of the same name is not looked at."""


def known_sinks() -> list[str]:
    """The names of all sinks, built in and of installed packages; none is imported."""
    return [*SINKS, *sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)} - SINKS.keys())]


def sink_entry(name: str) -> SinkEntry:
    """The entry of the sink ``name``.

    Raises UserError for a name that no package provides, with the nearest and all known names, or that several do.
    """
    if name in SINKS:
        return SINKS[name]
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        known = known_sinks()
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"no sink is called {name}; {hint}known: {', '.join(known)}")
    if len(points) > 1:
        packages = ", ".join(sorted({point.dist.name for point in points if point.dist is not None}))
        raise UserError(f"several packages have a sink {name}: {packages}; uninstall all but one")
    return SinkEntry(cls=points[0].value)


def check_installed(names: Iterable[str]) -> None:
    """UserError where a package that one of these sinks needs is not installed here."""
    for name in names:
        needs = sink_entry(name).needs
        if needs is not None and importlib.util.find_spec(needs) is None:
            raise UserError(
                f"metrics.sinks names {name}, but the package {needs} is not installed; "
                f"pip install 'lightscale[{needs}]', or take {name} out of metrics.sinks"
            )
