"""Settings of jobs: [launch] in ~/.config/lightscale/launch.toml, in a run's file, and on the command line.

They are the same for all schedulers, which refuse those that they lack (`Scheduler.check_settings`).
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from lightscale.config.fields import field_type_text, toml_value
from lightscale.config.files import launch_tables
from lightscale.config.schema import Section
from lightscale.errors import UserError

SITE_FILE = Path("lightscale") / "launch.toml"
# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class LaunchSettings(Section):
    """[launch]: how runs are submitted to a scheduler."""

    nodes: int = Field(default=1, ge=1)
    """Nodes of a job."""
    time: str | None = None
    """Time limit of a job: hours:minutes:seconds or days-hours."""
    partition: str | None = None
    """Partition (queue) of the cluster; none: the cluster's default."""
    account: str | None = None
    """Account that is charged."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs asked for on each node."""
    cpus_per_node: int | None = Field(default=None, ge=1)
    """Cores asked for on each node."""
    processes: int | None = Field(default=None, ge=1)
    """Ranks on each node; none: one for each GPU, or one."""
    min_nodes: int | None = Field(default=None, ge=1)
    """Least number of nodes with which a chain's job continues after some failed; none: half of them."""
    jobs_at_once: int = Field(default=1, ge=1)
    """With --scheduler local, on a machine without GPUs: jobs that may run there together."""
    signal_s: int = Field(default=300, ge=1)
    """Seconds before the time limit at which the run saves and exits: more than a step and a save."""
    setup: list[str] = Field(default=[])
    """Lines of the script before the run, like "module load cuda"."""
    environment: dict[str, str | int] = Field(default={})
    """Variables of the ranks, like NCCL_SOCKET_IFNAME."""
    options: list[str] = Field(default=[])
    """More options of the scheduler, like "--constraint=h100"."""

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return self.processes or self.gpus_per_node or 1

    @property
    def time_s(self) -> int | None:
        """`time` in seconds."""
        return None if self.time is None else _seconds(self.time)


def load_settings(config: Path, overrides: Sequence[str], given: Mapping[str, Any]) -> LaunchSettings:
    """The site's settings, over them those of the files of `config`, the `overrides` (launch.key=value), and `given`.

    Raises UserError that names the file, the key, its value, and what is allowed.
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
        lines = [_explain(str(one["loc"][0]), one["type"], values, origins) for one in error.errors()]
        raise UserError("\n".join(dict.fromkeys(lines))) from None
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
        parsed = tomllib.loads(f"{name} = {value}")
    except tomllib.TOMLDecodeError:
        # A bare word, as in launch.partition=long, is no TOML. It is taken as text, and the dots before it as tables.
        parsed = {}
        for part in reversed(name.split(".")):
            parsed = {part: parsed or value}
    return f'override "{text}"', parsed


def _explain(key: str, kind: str, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    where, field = origins.get(key, "[launch]"), LaunchSettings.model_fields.get(key)
    if kind == "extra_forbidden" or field is None:
        return f"{where}: unknown key launch.{key}; there are {', '.join(LaunchSettings.model_fields)}"
    return f"{where}: launch.{key} = {toml_value(values[key])}: must be {field_type_text(field)}"


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
            f'{origins["time"]}: launch.time = "{settings.time}": must be hours:minutes:seconds or days-hours, '
            'like "24:00:00" or "2-12"'
        )
    if settings.time_s is not None and settings.signal_s >= settings.time_s:
        raise UserError(
            f"launch.signal_s = {settings.signal_s}: must be less than the time limit, launch.time = {settings.time}"
        )
    if settings.min_nodes is not None and settings.min_nodes > settings.nodes:
        raise UserError(f"launch.min_nodes = {settings.min_nodes}: must be at most launch.nodes = {settings.nodes}")
    for name in settings.environment:
        if not _NAME.fullmatch(name):
            raise UserError(f"{origins['environment']}: launch.environment.{name}: must be the name of a variable")
    for option in settings.options:
        if not option.startswith("-") or "\n" in option:
            raise UserError(
                f'{origins["options"]}: launch.options has "{option}": must be options of the scheduler, '
                'like "--qos=high"'
            )
