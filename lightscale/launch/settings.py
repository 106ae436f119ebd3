"""Settings of jobs: [launch] in ~/.config/lightscale/launch.toml, in a run's file, and on the command line.

They are the same for all schedulers; a scheduler refuses settings that it lacks (`Scheduler.check_settings`).
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from lightscale.config.fields import field_type_text, shown_key, shown_value
from lightscale.config.files import launch_tables, mistakes
from lightscale.config.section import MOST_ENTRIES, MOST_RANKS, Section
from lightscale.config.toml import MOST_LEVELS, TomlError, parse_toml
from lightscale.errors import UserError, shortened

SITE_FILE = Path("lightscale") / "launch.toml"
# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
_TIME = re.compile(r"[0-9]{1,6}(:[0-9]{2}){0,2}|[0-9]{1,6}-[0-9]{1,6}(:[0-9]{2}){0,2}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_PerNode = Annotated[int, Field(ge=1, le=1024)]
_Nodes = Annotated[int, Field(ge=1, le=MOST_RANKS)]
_Lines = Annotated[list[str], Field(max_length=MOST_ENTRIES)]
# Beyond 64 bits Python may not even write a number.
_Variable = str | Annotated[int, Field(ge=-(2**63), lt=2**63)]


class LaunchSettings(Section):
    """[launch]: settings of scheduler jobs."""

    nodes: _Nodes = 1
    """Number of nodes of a job."""
    time: str | None = None
    """Time limit of a job: hours:minutes:seconds or days-hours."""
    partition: str | None = None
    """Partition (queue) of the cluster; none: the cluster's default."""
    account: str | None = None
    """Account to charge."""
    gpus_per_node: _PerNode | None = None
    """GPUs per node."""
    cpus_per_node: _PerNode | None = None
    """CPU cores per node."""
    processes: _PerNode | None = None
    """Ranks per node; none: one per GPU, or one."""
    min_nodes: _Nodes | None = None
    """Minimum number of nodes to continue a chain's job with after node failures; none: half of them."""
    jobs_at_once: _PerNode = 1
    """With --scheduler local on a machine without GPUs: number of concurrent jobs."""
    signal_s: Annotated[int, Field(ge=1, le=604_800)] = 300
    """Seconds before the time limit at which the run saves and exits; longer than a step and a save."""
    setup: _Lines = Field(default=[])
    """Lines of the script before the run, such as "module load cuda"."""
    environment: dict[str, _Variable] = Field(default={}, max_length=MOST_ENTRIES)
    """Environment variables of the ranks, such as NCCL_SOCKET_IFNAME."""
    options: _Lines = Field(default=[])
    """More options of the scheduler, such as "--constraint=h100"."""

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return self.processes or self.gpus_per_node or 1

    @property
    def time_s(self) -> int | None:
        """`time` in seconds."""
        return None if self.time is None else _seconds(self.time)


def load_settings(config: Path, overrides: Sequence[str], given: Mapping[str, Any]) -> LaunchSettings:
    """Load the site's settings, overridden by the files of `config`, by `overrides` (launch.key=value), and by `given`.

    Raises UserError with the file, the key, its value and the allowed values.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    command_line = {"command line": {name: value for name, value in given.items() if value is not None}}
    layers = [*_site(), *launch_tables(config), *map(_override, overrides), *command_line.items()]
    for origin, table in layers:
        for key, value in table.items():
            before = values.get(key)
            # Variables of launch.environment add up over the layers; any other key of a later layer replaces the
            # earlier value.
            merges = isinstance(before, dict) and isinstance(value, dict)
            values[key] = {**before, **value} if merges and before is not None else value
            origins[key] = origin
    try:
        settings = LaunchSettings.model_validate(values)
    except ValidationError as error:
        raise UserError(mistakes(error, lambda item: _explain(item, values, origins))) from None
    _check(settings, origins)
    return settings


def _site() -> Iterator[tuple[str, dict[str, Any]]]:
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = folder / SITE_FILE
    if path.exists():
        yield from launch_tables(path)


def _override(text: str) -> tuple[str, dict[str, Any]]:
    name, _, value = text.removeprefix("launch.").partition("=")
    try:
        parsed = parse_toml(f"{name} = {value}")
    except TomlError:
        # A bare word, as in launch.partition=long, is no TOML. It is taken as text, and the dots before it as tables.
        parsed = {}
        for part in reversed(name.split(".", maxsplit=MOST_LEVELS)):
            parsed = {part: parsed or value}
    return f'override "{shortened(text)}"', parsed


def _explain(error: Mapping[str, Any], values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    key = str(error["loc"][0])
    where, field = origins.get(key, "[launch]"), LaunchSettings.model_fields.get(key)
    name = shown_key(["launch", key])
    if error["type"] == "extra_forbidden" or field is None:
        return f"{where}: unknown key {name}; the keys are {', '.join(LaunchSettings.model_fields)}"
    wanted = error["ctx"]["error"] if error["type"] == "value_error" else f"must be {field_type_text(field)}"
    return f"{where}: {name} = {shown_value(values[key])}: {wanted}"


def _seconds(time: str) -> int:
    """A time limit in seconds. Without a dash, one number is minutes; behind one, hours come first."""
    days, dash, clock = time.rpartition("-")
    parts = list(map(int, clock.split(":")))
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = [[0, *parts, 0], [0, *parts], parts][len(parts) - 1]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check(settings: LaunchSettings, origins: Mapping[str, str]) -> None:
    if settings.time is not None and not _TIME.fullmatch(settings.time):
        raise UserError(
            f"{origins['time']}: launch.time = {shown_value(settings.time)}: must be hours:minutes:seconds or "
            'days-hours, such as "24:00:00" or "2-12"'
        )
    if settings.time_s is not None and settings.signal_s >= settings.time_s:
        raise UserError(
            f"launch.signal_s = {settings.signal_s}: must be less than the time limit, launch.time = {settings.time}"
        )
    if settings.min_nodes is not None and settings.min_nodes > settings.nodes:
        raise UserError(f"launch.min_nodes = {settings.min_nodes}: must be at most launch.nodes = {settings.nodes}")
    for name in settings.environment:
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{origins['environment']}: launch.environment.{shortened(name)}: must be the name of a variable"
            )
    for option in settings.options:
        if not option.startswith("-") or "\n" in option:
            raise UserError(
                f"{origins['options']}: launch.options has {shown_value(option)}: must be options of the scheduler, "
                'such as "--qos=high"'
            )
