"""Configurations drawn from the schema, each with a layout of its ranks; see ``options.py`` for the values."""

import functools
import random
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from layout_fuzzing.options import DRAWN_TASKS, IMAGE_GRIDS, NOT_DRAWN, NUMBERS, TOKENS, values_of
from lightscale.config.mixers import MIXERS, Direction, mixer_options_type
from lightscale.config.model import DiffusionConfig, GridConfig, HeadConfig, ModelConfig, PatchesConfig
from lightscale.config.optimizers import OPTIMIZERS, optimizer_class
from lightscale.config.schema import AdapterConfig, DataConfig, ParallelConfig, TrainConfig
from lightscale.config.tasks import task_class

_ADAPTERS = 0.15
"""Share of the cases that train adapters."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A case: a configuration's keys that were drawn, the ranks, and where sequence ranks begin if not evenly."""

    world_size: int
    keys: dict[str, Any] = field(default_factory=dict)
    """Dotted keys to values; others have their defaults."""
    cuts: tuple[int, ...] | None = None
    """First token of each sequence rank."""

    @property
    def mixers(self) -> set[str]:
        """Names of the mixers of the layers."""
        named = self.keys["model.mixer"]
        return set(named) if isinstance(named, list) else {named}

    def axes(self) -> dict[str, int]:
        """Ranks along each axis."""
        found = {axis: int(self.keys.get(f"parallel.{axis}", 1)) for axis in ("tensor", "pipeline", "sequence")}
        used = found["tensor"] * found["pipeline"] * found["sequence"]
        return {**found, "data": self.world_size // used}

    def uses(self, axis: str) -> bool:
        """Whether it has several ranks along ``axis``, or "uneven" segments, or "virtual stages"."""
        if axis == "uneven":
            return self.cuts is not None
        if axis == "virtual stages":
            return int(self.keys.get("parallel.virtual_stages", 1)) > 1
        return self.axes()[axis] > 1

    def edges(self, tokens: int) -> tuple[int, ...]:
        """Where uneven segments of a sequence of ``tokens`` begin, and its end."""
        assert self.cuts is not None, "even segments"
        return (*(cut * tokens // TOKENS for cut in self.cuts), tokens)


class Drawer:
    """Draws cases from ``rng``.

    share: of the options that are not left at their defaults. periods: lengths of the pattern of mixers.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        world_sizes: Sequence[int] = (2, 3, 4),
        share: float = 0.35,
        periods: Sequence[int] = (1, 1, 2),
    ) -> None:
        self.rng, self.world_sizes, self.share, self.periods = rng, world_sizes, share, periods
        self._fixed: Mapping[str, Any] = {}

    def draw(self, fixed: Mapping[str, Any] | None = None, *, axis: str | None = None) -> Drawn:
        """A case, which validation may refuse.

        Keys of ``fixed`` have its values wherever they are drawn at all; ``axis``: the layout uses it (``Drawn.uses``).
        """
        rng, self._fixed = self.rng, fixed or {}
        mixer = self._fixed.get("model.mixer")
        task = self._choose("task.name", [name for name in DRAWN_TASKS if self._can_be(name)] or DRAWN_TASKS)
        kind = task_class(task)
        able = [name for name, entry in MIXERS.items() if entry.directions & kind.directions and name != mixer]
        pattern = rng.sample(able, k=rng.choice(self.periods))
        if mixer is not None:
            pattern[rng.randrange(len(pattern))] = mixer
        keys: dict[str, Any] = {"task.name": task, "model.mixer": pattern if len(pattern) > 1 else pattern[0]}
        sizes = ["num_layers", "hidden_size", "num_heads", "intermediate_size"]
        for name in [*sizes, "vocab_size"]:
            keys[f"model.{name}"] = self._choose(f"model.{name}", NUMBERS[f"model.{name}"])
        if kind.predicts_labels:
            self._table(keys, "model.head", HeadConfig)
        if kind.reads_images:
            self._table(keys, "model.patches", PatchesConfig)
            grids = [one for one in IMAGE_GRIDS if not (kind.predicts_noise and GridConfig(**one).leading_tokens)]
            keys["model.grid"] = self._choose("model.grid", grids)
        if kind.predicts_noise:
            self._table(keys, "model.diffusion", DiffusionConfig)
        self._options(keys, "model", ModelConfig)
        if kind.reads_images:
            # Images have no ids.
            del keys["model.vocab_size"]
        for name in pattern:
            self._mixer(keys, name, kind.directions)
        self._options(keys, "task", kind.options)
        self._options(keys, "train", TrainConfig)
        self._options(keys, "data", DataConfig)
        able = [name for name in OPTIMIZERS if self._has_fields("optimizer", optimizer_class(name).options)]
        keys["optimizer.name"] = optimizer = self._choose("optimizer.name", able)
        self._options(keys, "optimizer", optimizer_class(optimizer).options)
        if self._has_fixed("adapter") or rng.random() < _ADAPTERS:
            keys["adapter.name"] = self._choose("adapter.name", NUMBERS["adapter.name"])
            self._options(keys, "adapter", AdapterConfig)
        is_whole = kind.keeps_documents_whole or keys.get("model.head.pairs")
        packing = "concat" if kind.reads_images else "whole" if is_whole else None
        keys["data.packing"] = self._choose("data.packing", [packing] if packing else _values(DataConfig, "packing"))
        drawn = self._with_layout(keys)
        while axis is not None and not drawn.uses(axis):
            drawn = self._with_layout(keys)
        fewest = keys.get("train.micro_batch_size", 1) * _micro_batches(drawn)
        if ramp := keys.get("train.rampup_batch_size"):
            fewest = 2 * ramp[0]["global_batch_size"]
        drawn.keys["train.global_batch_size"] = self._choose("train.global_batch_size", [fewest])
        return drawn

    def _can_be(self, task: str) -> bool:
        """Whether a model for ``task`` has the mixer and all keys that are fixed."""
        kind, mixer = task_class(task), self._fixed.get("model.mixer")
        has = {"model.head": kind.predicts_labels, "model.patches": kind.reads_images}
        has["model.diffusion"] = kind.predicts_noise
        has["model.vocab_size"] = not kind.reads_images
        return (
            (mixer is None or bool(kind.directions & MIXERS[mixer].directions))
            and self._has_fields("task", kind.options)
            and all(able for key, able in has.items() if self._has_fixed(key))
        )

    def _has_fields(self, section: str, kind: type[BaseModel]) -> bool:
        """Whether all fixed keys of ``section`` are fields of ``kind``."""
        inside = [key.split(".")[1] for key in self._fixed if key.startswith(f"{section}.")]
        return all(name in kind.model_fields for name in inside)

    def _choose(self, key: str, values: Sequence[Any]) -> Any:
        return self._fixed[key] if key in self._fixed else self.rng.choice(values)

    def _has_fixed(self, key: str) -> bool:
        """Whether ``key``, or one of its table, has a fixed value."""
        return any(f"{one}.".startswith(f"{key}.") for one in self._fixed)

    def _mixer(self, keys: dict[str, Any], name: str, directions: Collection[Direction]) -> None:
        prefix, entry = f"model.mixer_options.{name}", MIXERS[name]
        options = mixer_options_type(name)
        if len(entry.directions) == 2:
            fitting = [direction == "causal" for direction in sorted(directions)]
            keys[f"{prefix}.causal"] = self._choose(f"{prefix}.causal", fitting)
        if options is not None:
            self._options(keys, prefix, options)

    def _options(self, keys: dict[str, Any], prefix: str, kind: type[BaseModel]) -> None:
        for key, values in _drawn_fields(prefix, kind):
            if key in keys or any(had.startswith(f"{key}.") for had in keys):
                continue
            if self._has_fixed(key) or self.rng.random() < self.share:
                self._value(keys, key, values)

    def _table(self, keys: dict[str, Any], prefix: str, kind: type[BaseModel]) -> None:
        """Fields of a table that is there or not: those without a default, and half of the others."""
        for key, values in _drawn_fields(prefix, kind):
            is_required = kind.model_fields[key.rpartition(".")[2]].is_required()
            if is_required or self._has_fixed(key) or self.rng.random() < 0.5:
                self._value(keys, key, values)

    def _value(self, keys: dict[str, Any], key: str, values: Sequence[Any]) -> None:
        is_inside = self._has_fixed(key) and key not in self._fixed
        value = self._choose(key, [one for one in values if isinstance(one, type)] if is_inside else values)
        if isinstance(value, type):
            self._table(keys, key, value)
        else:
            keys[key] = value

    def _with_layout(self, model: dict[str, Any]) -> Drawn:
        rng, keys = self.rng, dict(model)
        world_size = left = rng.choice(self.world_sizes)
        for axis in rng.sample(("tensor", "pipeline", "sequence", "data"), k=4):
            ranks = rng.choice([n for n in range(1, left + 1) if left % n == 0])
            left //= ranks
            if axis != "data":
                keys[f"parallel.{axis}"] = ranks
        if left > 1:
            # Not all were given out: to sequence ranks, which every model can have.
            keys["parallel.sequence"] *= left if rng.random() < 0.5 else 1
        if keys["parallel.pipeline"] > 1 and (self._has_fixed("parallel.virtual_stages") or rng.random() < 0.3):
            keys["parallel.virtual_stages"] = 2
        if keys["parallel.sequence"] > 1:
            for name in ("exchange", "attention"):
                keys[f"parallel.{name}"] = self._choose(f"parallel.{name}", _values(ParallelConfig, name))
            if keys["parallel.exchange"] == "two_level":
                keys["parallel.ranks_per_node"] = rng.choice((1, 2, 4))
        return Drawn(world_size=world_size, keys=keys, cuts=self._cuts(keys))

    def _cuts(self, keys: dict[str, Any]) -> tuple[int, ...] | None:
        """Uneven segments, some of them empty, where one tensor rank and one stage allow any length."""
        ranks = keys["parallel.sequence"]
        if ranks == 1 or keys["parallel.tensor"] * keys["parallel.pipeline"] > 1 or self.rng.random() > 0.4:
            return None
        return (0, *sorted(self.rng.choice((0, TOKENS, self.rng.randrange(TOKENS))) for _ in range(ranks - 1)))


@functools.cache
def _drawn_fields(prefix: str, kind: type[BaseModel]) -> list[tuple[str, list[Any]]]:
    """Keys of the fields that are drawn, with their values."""
    fields = [(f"{prefix}.{name}", one.annotation) for name, one in kind.model_fields.items()]
    found = [(key, values_of(key, annotation)) for key, annotation in fields if key not in NOT_DRAWN]
    return [(key, values) for key, values in found if values is not None]


def _values(kind: type[BaseModel], name: str) -> list[Any]:
    """All of a Literal."""
    return list(typing.get_args(kind.model_fields[name].annotation))


def _micro_batches(drawn: Drawn) -> int:
    """Of a step, on all data ranks: the fewest, but two, that the layout divides."""
    axes = drawn.axes()
    return max(2, axes["data"] * (axes["pipeline"] if "parallel.virtual_stages" in drawn.keys else 1))


def with_value(keys: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """``keys`` with another value of ``key``: a table that it replaces, or that has it, is not there or is."""
    kept = {one: held for one, held in keys.items() if not one.startswith(f"{key}.") and not key.startswith(f"{one}.")}
    return {**kept, key: value}


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables. Names of mixers have no dots."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        *path, name = key.split(".")
        table = found
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return found
