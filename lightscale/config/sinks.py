"""The sinks that ``metrics.sinks`` can name, and the modules that implement them.

Entries are import strings, so that reading a configuration waits neither for TensorBoard nor for wandb. A sink is
imported when it is opened (``lightscale.runs.metrics.registry``), on rank 0 only.

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
    """Import string of a sink, and its properties that need no import."""

    cls: str
    """As "module:name", a subclass of ``lightscale.runs.metrics.sink.Sink``."""
    needs: str | None = None
    """The package that it needs, installed by the extra of the same name."""
    is_record: bool = False
    """Whether other commands read its output; the training thread then writes it, without delay."""


_MODULES = "lightscale.runs.metrics"

RECORD = "jsonl"
SINKS: dict[str, SinkEntry] = {
    RECORD: SinkEntry(cls=f"{_MODULES}.jsonl:JsonlSink", is_record=True),
    "tensorboard": SinkEntry(cls=f"{_MODULES}.tensorboard:TensorboardSink"),
    "wandb": SinkEntry(cls=f"{_MODULES}.wandb:WandbSink", needs="wandb"),
}
"""The built-in sinks. An entry point of the same name is ignored."""


def known_sinks() -> list[str]:
    """Names of all sinks, built in and from installed packages; none is imported."""
    return [*SINKS, *sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)} - SINKS.keys())]


def sink_entry(name: str) -> SinkEntry:
    """The entry of the sink ``name``.

    Raises UserError for an unknown name (listing the nearest and all known names) and for one that several packages
    provide.
    """
    if name in SINKS:
        return SINKS[name]
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        known = known_sinks()
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"unknown sink {name}; {hint}known: {', '.join(known)}")
    if len(points) > 1:
        packages = ", ".join(sorted({point.dist.name for point in points if point.dist is not None}))
        raise UserError(f"several packages provide a sink {name}: {packages}; uninstall all but one")
    return SinkEntry(cls=points[0].value)


def check_installed(names: Iterable[str]) -> None:
    """Raise UserError when a package that one of these sinks needs is not installed."""
    for name in names:
        needs = sink_entry(name).needs
        if needs is not None and importlib.util.find_spec(needs) is None:
            raise UserError(
                f"metrics.sinks names {name}, but the package {needs} is not installed; "
                f"pip install 'lightscale[{needs}]', or remove {name} from metrics.sinks"
            )
