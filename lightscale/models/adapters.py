"""Low-rank adapters (LoRA, DoRA) of a model's linear maps, by name, from its shape alone; without torch.

A linear map is a weight of a mixer or a gated linear unit, or the rows of one that have one role
(``MixerSpec.roles``). Names are ``layers.LAYER.mixer.ROLE``; of linear units, ``layers.LAYER.mlp.gate``, ``up`` and
``down``.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal

from lightscale.config.model import ModelConfig
from lightscale.config.schema import AdapterConfig, RunConfig
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes
from lightscale.models.registry import mixer_spec
from lightscale.models.specs.interface import Shapes
from lightscale.models.stages import layer_stages

Ranges = tuple[tuple[int, int], ...]
ADAPTERS = "adapters"
"""The module of a mixer or gated linear unit that holds its adapters, by the last part of their maps' names."""
_WEIGHT = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<module>self_attention|mlp)\.(?P<own>.+)\.weight")
_ROW_PARALLEL = ("out_proj", "linear_fc2")


@dataclass(frozen=True, kw_only=True)
class LinearMap:
    """A linear map of a block, x -> W x."""

    name: str
    weight: str
    """Global name of the parameter with W."""
    ranges: Ranges
    """First and last + 1 of its rows there, in the order of W."""
    width_in: int
    split: Literal["rows", "columns"] | None
    """What of W tensor ranks share out; None: each has the whole."""

    @property
    def width_out(self) -> int:
        """Rows of W."""
        return sum(last - first for first, last in self.ranges)

    @property
    def layer(self) -> int:
        """From 0."""
        return int(self.name.split(".")[1])

    def parameters(self, adapter: AdapterConfig) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Whole shape of each parameter of its adapter by global name, and the dim that tensor ranks split."""
        module, own = self.weight.split(".")[:4], self.name.rsplit(".", 1)[1]
        prefix = ".".join([*module, ADAPTERS, own])
        rows, columns = (0 if self.split == "rows" else None), (1 if self.split == "columns" else None)
        found: dict[str, tuple[tuple[int, ...], int | None]] = {
            f"{prefix}.lora_A": ((adapter.r, self.width_in), columns),
            f"{prefix}.lora_B": ((self.width_out, adapter.r), rows),
        }
        if adapter.name == "dora":
            found[f"{prefix}.lora_magnitude_vector"] = ((self.width_out,), rows)
        return found


def linear_maps(model: ModelConfig) -> Iterator[LinearMap]:
    """Those of all mixers and gated linear units, first layer to last."""
    for name, shape in parameter_shapes(model).items():
        match = _WEIGHT.fullmatch(name)
        if match is None or len(shape) != 2 or match["own"].endswith("_conv"):
            continue
        layer, own = int(match["layer"]), match["own"]
        if match["module"] == "mlp":
            half = shape[0] // 2 if model.gated_linear_unit else 0
            parts: dict[str, Ranges] = (
                {"up": ((half, shape[0]),)} if own == "linear_fc1" else {"down": ((0, shape[0]),)}
            )
            if half and own == "linear_fc1":
                parts = {"gate": ((0, half),), **parts}
            whole, place = False, "mlp"
        else:
            spec = mixer_spec(model.layers[layer])
            # A mixer of another package may have no roles: the parameter's own name then.
            parts = {
                role: rows.ranges or ((0, shape[0]),)
                for role, rows in spec.roles(model, layer).items()
                if rows.parameter == f"{own}.weight"
            } or {own: ((0, shape[0]),)}
            whole, place = f"{own}.weight" in spec.whole_parameters(model, layer), "mixer"
        for role, ranges in parts.items():
            yield LinearMap(
                name=f"layers.{layer}.{place}.{role}",
                weight=name,
                ranges=ranges,
                width_in=shape[1],
                split=None if whole else "columns" if own in _ROW_PARALLEL else "rows",
            )


def adapted_maps(model: ModelConfig, adapter: AdapterConfig) -> list[LinearMap]:
    """The maps that get an adapter. UserError for a pattern that is the name of none."""
    maps = list(linear_maps(model))
    for pattern in adapter.target_modules:
        if not any(fnmatchcase(one.name, pattern) for one in maps):
            names = [one.name for one in maps]
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3) or names[:1]
            raise UserError(
                f'adapter.target_modules: "{pattern}" is the name of no linear map of the model; a name is {near[0]}, '
                "and * is any text"
            )
    return [one for one in maps if any(fnmatchcase(one.name, own) for own in adapter.target_modules)]


def check_adapter(config: RunConfig) -> None:
    """UserError for patterns that name no linear map, and for pipeline stages that would have nothing to train."""
    if config.adapters is None:
        return
    layers = {one.layer for one in adapted_maps(config.model, config.adapters)}
    stages = config.parallel.pipeline * config.parallel.virtual_stages
    for stage, held in enumerate(layer_stages(config.model.num_layers, stages)):
        if not layers & {*held}:
            raise UserError(
                f"adapter.target_modules = {config.adapters.target_modules}: pipeline stage {stage}, layers "
                f"{held.start} to {held.stop - 1}, has no adapter and so nothing to train; add a map of these layers, "
                "or use parallel.pipeline = 1"
            )


def trained_shapes(config: RunConfig) -> Shapes:
    """Unsplit shape of every parameter that a run trains and stores, by its global name."""
    if config.adapters is None:
        return parameter_shapes(config.model)
    return {
        name: shape
        for one in adapted_maps(config.model, config.adapters)
        for name, (shape, _) in one.parameters(config.adapters).items()
    }


def rank_adapter_parameters(
    model: ModelConfig, adapter: AdapterConfig, *, tensor: int, pipeline: int
) -> list[dict[str, int]]:
    """Elements of each adapter's parameter that each tensor rank holds, by its pipeline stage."""
    stages = layer_stages(model.num_layers, pipeline)
    held: list[dict[str, int]] = [{} for _ in stages]
    for one in adapted_maps(model, adapter):
        stage = next(number for number, layers in enumerate(stages) if one.layer in layers)
        for name, (shape, split) in one.parameters(adapter).items():
            held[stage][name] = prod(shape) // (1 if split is None else tensor)
    return held
