"""Weights that a model with other mixers, or with more ids, keeps from another model, by role; without torch.

    conversion(source, target)      from two shapes: the initial value of each parameter of the target
    Conversion.moves                the same as rows to copy, for readers of the source's tensors
    Conversion.table                the same for people and records

The spec of a mixer lists the roles of its parameters (``MixerSpec.roles``). All other parameters keep their names.
"""

import bisect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pydantic import BaseModel

from lightscale.config.fields import shown_value
from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes
from lightscale.models.registry import mixer_spec
from lightscale.models.specs.interface import ParameterRows

_FIXED = ("hidden_size", "num_layers", "intermediate_size")
"""Settings that two models must share, because hardly any weight would fit without them."""
_OF_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Have a row for each id."""
_OTHERS = (
    *("num_heads", "glu_activation", "norm", "norm_placement", "zero_centered_norm", "final_norm", "norm_eps"),
    *("gated_linear_unit", "mlp_bias", "norm_elementwise_affine"),
    *("input_multiplier", "final_logit_cap", "grid", "tpe", "patches"),
)
"""Settings that may differ, and change the function of kept weights; with options of mixers that both have."""
_OF_INITIAL_WEIGHTS = ("initial_decay",)
"""Options of mixers that decide what is drawn, and nothing of kept weights."""
_KEYS = {"input_multiplier": "model.embedding_multiplier (times that of model.mup)"}
"""Names for people of what is no key."""
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.)")

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class RoleWeight:
    """A parameter of a model, or the rows of it that have one role."""

    parameter: str
    """Its global name."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    role: str | None = None
    ranges: Ranges | None = None
    """As in ``ParameterRows``."""

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Of the rows together."""
        if self.ranges is None:
            return self.shape
        return (sum(last - first for first, last in self.ranges), *self.shape[1:])


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """How some weights of the target begin."""

    weight: RoleWeight
    source: RoleWeight | None
    """None: they are drawn."""
    reason: str = ""
    """Why they are drawn."""


@dataclass(frozen=True, kw_only=True)
class RowMove:
    """Rows first … last - 1 of a source's parameter, which are the rows ``to`` … of a parameter of the target."""

    first: int
    last: int
    parameter: str
    shape: tuple[int, ...]
    """Of the target's whole parameter."""
    to: int


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Initial value of every weight of ``target`` that starts from the weights of ``source``."""

    source: ModelConfig
    target: ModelConfig
    beginnings: tuple[Beginning, ...]
    unused: tuple[RoleWeight, ...]
    """Of the source."""

    @cached_property
    def moves(self) -> dict[str, list[RowMove]]:
        """Rows to copy from each of the source's parameters, by its global name."""
        found: dict[str, list[RowMove]] = {}
        for one in self.beginnings:
            if one.source is not None:
                found.setdefault(one.source.parameter, []).extend(_moves(one.source, one.weight))
        return found

    def table(self) -> list[dict[str, str]]:
        """Parameters of the target with where they come ``from``, then those of the source that are not used.

        A layer's number stands for all layers of which the same can be said, as in ``decoder.layers.0-3,7.mlp…``.
        """
        rows = [_row(one) for one in self.beginnings]
        rows += [{"unused": one.parameter, "role": one.role or ""} for one in self.unused]
        layers: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for row in rows:
            # The source of a layer's weight is in the same layer.
            number = next((int(match[0]) for match in map(_LAYER.search, row.values()) if match), None)
            alike = tuple((key, _LAYER.sub("LAYERS", value)) for key, value in row.items() if value)
            layers.setdefault(alike, []).extend([] if number is None else [number])
        return [
            {key: value.replace("LAYERS", _ranges_text(numbers)) for key, value in alike}
            for alike, numbers in layers.items()
        ]

    def lines(self) -> list[str]:
        """The table, and other settings that differ, as text."""
        there, here = (", ".join(dict.fromkeys(model.layers)) for model in (self.source, self.target))
        found = [f"from {there} to {here}:"]
        for row in self.table():
            name = row.get("parameter") or row["unused"]
            what = f"{name} ({row['role']})" if "role" in row else name
            found.append(f"  {what}: {_told(row)}")
        return found + [f"  {line}" for line in other_settings(self.source, self.target)]


def conversion(source: ModelConfig, target: ModelConfig) -> Conversion | None:
    """What ``target`` keeps of a model of the shape ``source``; None: all of it, as mixers, their heads, the output
    layer and the vocabulary are the same.

    Ids that the source does not have are drawn, as a mask that is new (transformers' ``resize_token_embeddings``).
    UserError where inputs, widths or layers differ, so that they share no shapes, where the same mixers have other
    shapes, as of images with other channels, and where the target has fewer ids.
    """
    before, now = ("ids" if model.patches is None else "patches of images" for model in (source, target))
    if before != now:
        raise UserError(f"its model reads {before} and that of this run {now} (model.patches); use a run of {now}")
    if source.diffusion != target.diffusion:
        raise UserError(
            f"its [model.diffusion] is {source.diffusion} and that of this run {target.diffusion}; use the same table"
        )
    for key in _FIXED:
        there, here = getattr(source, key), getattr(target, key)
        if there != here:
            raise UserError(
                f"its model.{key} is {there} and that of this run {here}; kept weights need the same value: use "
                f"model.{key}={there}"
            )
    if all(getattr(source, key) == getattr(target, key) for key in ("layers", "num_heads", "head", "vocab_size")):
        _require_same_parameters(source, target)
        return None
    if target.vocab_size < source.vocab_size:
        raise UserError(
            f"its model.vocab_size is {source.vocab_size} and that of this run {target.vocab_size}, fewer than its "
            f"ids: use model.vocab_size={source.vocab_size} or more"
        )
    if source.head is None and target.head is None and target.tie_word_embeddings > source.tie_word_embeddings:
        raise UserError(
            "model.tie_word_embeddings = true replaces its separate output layer by the embedding: use "
            "model.tie_word_embeddings=false"
        )
    given, taken = _weights(source, target), _weights(target, source)
    beginnings = tuple(_beginning(weight, given.get(key)) for key, weight in taken.items())
    if source.layers == target.layers and source.num_heads == target.num_heads:
        _require_shapes(given, taken)
    used = {one.source for one in beginnings}
    return Conversion(
        source=source,
        target=target,
        beginnings=beginnings,
        unused=tuple(weight for weight in given.values() if weight not in used),
    )


def _require_same_parameters(source: ModelConfig, target: ModelConfig) -> None:
    """UserError where one has a parameter that the other lacks, or has in another shape."""
    there, here = (dict(parameter_shapes(model)) for model in (source, target))
    for name in dict.fromkeys((*there, *here)):
        before, now = (shapes.get(name, "missing") for shapes in (there, here))
        if before != now:
            lines = "; ".join(line.partition(": ")[0] for line in other_settings(source, target))
            raise UserError(f"{name} is {before} there and {now} here" + (f": {lines}" if lines else ""))


def _require_shapes(given: dict[str, RoleWeight], taken: dict[str, RoleWeight]) -> None:
    """UserError where a weight of the same mixer has another shape: its options differ, and it would be drawn anew."""
    for key, weight in taken.items():
        # The output layer is another one where labels are predicted.
        if key in given and key not in _OF_VOCABULARY and given[key].rows_shape != weight.rows_shape:
            raise UserError(f"{weight.parameter} is {given[key].rows_shape} there and {weight.rows_shape} here")


def other_settings(source: ModelConfig, target: ModelConfig) -> list[str]:
    """Differences beside weights that change the function of kept weights: a line each."""
    settings = [(_KEYS.get(key, f"model.{key}"), getattr(source, key), getattr(target, key)) for key in _OTHERS]
    for name in sorted({*source.layers} & {*target.layers}):
        there, here = (model.layer_options(model.layers.index(name)).model_dump() for model in (source, target))
        settings += [
            (f"model.mixer_options.{name}.{key}", there[key], here[key])
            for key in here
            if key not in _OF_INITIAL_WEIGHTS
        ]
    return [
        f"{key} = {_shown(now)} here and {_shown(before)} there: kept weights compute something else"
        for key, before, now in settings
        if before != now
    ]


def _shown(value: object) -> str:
    return shown_value(value.model_dump() if isinstance(value, BaseModel) else value)


def _beginning(weight: RoleWeight, source: RoleWeight | None) -> Beginning:
    if source is None:
        return Beginning(weight=weight, source=None, reason="missing in the source")
    if source.rows_shape != weight.rows_shape:
        reason = f"{source.rows_shape} there and {weight.rows_shape} here"
        return Beginning(weight=weight, source=None, reason=reason)
    return Beginning(weight=weight, source=source)


def _weights(model: ModelConfig, other: ModelConfig) -> dict[str, RoleWeight]:
    """The weights of ``model``, each by what one of ``other`` must be to take its place."""
    roles = {layer: _roles(model, other, layer) for layer in range(model.num_layers)}
    found: dict[str, RoleWeight] = {}
    for name, shape in parameter_shapes(model).items():
        layer = int(match[0]) if (match := _LAYER.search(name)) else None
        block, _, own = name.partition(".self_attention.")
        if name in _OF_VOCABULARY and shape[0] == model.vocab_size != other.vocab_size:
            found |= _ids(name, shape, min(model.vocab_size, other.vocab_size))
            continue
        if layer is None or not own or roles[layer] is None:
            found[name] = RoleWeight(parameter=name, shape=shape)
            continue
        of_parameter = {role: rows for role, rows in (roles[layer] or {}).items() if rows.parameter == own}
        for role, rows in of_parameter.items():
            found[f"{block} {role}"] = RoleWeight(parameter=name, shape=shape, role=role, ranges=rows.ranges)
        if not of_parameter:
            # Means the same only in a mixer of the same kind.
            found[f"{name} of {model.layers[layer]}"] = RoleWeight(parameter=name, shape=shape)
    return found


def _ids(name: str, shape: tuple[int, ...], num_shared: int) -> dict[str, RoleWeight]:
    """The rows of the ids that both models have, and of those that one has."""
    parts = {f"ids 0 to {num_shared - 1}": (0, num_shared)}
    if shape[0] > num_shared:
        parts[f"ids {num_shared} to {shape[0] - 1}"] = (num_shared, shape[0])
    return {
        f"{name} {role}": RoleWeight(parameter=name, shape=shape, role=role, ranges=(rows,))
        for role, rows in parts.items()
    }


def _roles(model: ModelConfig, other: ModelConfig, layer: int) -> dict[str, ParameterRows] | None:
    """None where the two models have the same mixer there: its parameters are kept by their names."""
    if model.layers[layer] == other.layers[layer] and model.num_heads == other.num_heads:
        return None
    return mixer_spec(model.layers[layer]).roles(model, layer)


def _moves(source: RoleWeight, target: RoleWeight) -> Iterator[RowMove]:
    given, taken = _ranges(source), _ranges(target)
    # Both have the same rows in all, and may cut them differently: fused matrices go by heads.
    for start, stop in itertools.pairwise(sorted({*_cuts(given), *_cuts(taken)})):
        first, to = _row_at(given, start), _row_at(taken, start)
        yield RowMove(first=first, last=first + stop - start, parameter=target.parameter, shape=target.shape, to=to)


def _ranges(weight: RoleWeight) -> Ranges:
    # A tensor without dims counts as one row.
    return weight.ranges or ((0, weight.shape[0] if weight.shape else 1),)


def _cuts(ranges: Ranges) -> list[int]:
    """Where each range begins among the rows of all, and where the last ends."""
    return list(itertools.accumulate((last - first for first, last in ranges), initial=0))


def _row_at(ranges: Ranges, index: int) -> int:
    """The row of the parameter that is number ``index`` of ``ranges``."""
    cuts = _cuts(ranges)
    number = bisect.bisect_right(cuts, index) - 1
    return ranges[number][0] + index - cuts[number]


def _row(one: Beginning) -> dict[str, str]:
    row = {"parameter": one.weight.parameter, "role": one.weight.role or ""}
    if one.source is None:
        return {**row, "drawn": one.reason}
    return {**row, "from": one.source.parameter}


def _told(row: dict[str, str]) -> str:
    if "unused" in row:
        return "not used"
    if "drawn" in row:
        return f"drawn, {row['drawn']}"
    return "kept" if row["from"] == row["parameter"] else f"from {row['from']}"


def _ranges_text(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
