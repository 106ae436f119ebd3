"""The optimizer of a run; ``config/optimizers.py`` has the names."""

import difflib
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod

from lightscale.config.optimizers import optimizer_class
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.models.adapters import trained_shapes
from lightscale.models.attention_heads import clipped_rows
from lightscale.models.matrices import matrices
from lightscale.models.mup import mup_scales
from lightscale.parallel.optimizer_spec import MatrixSpec, OptimizerSpec, RowRanges, StepScale

_WEIGHT_BYTES = 4


def optimizer_spec(config: RunConfig) -> OptimizerSpec:
    """The optimizer that section [optimizer] of ``config`` describes.

    Raises UserError for a pattern of a parameter group that names no parameter of the model, for a parameter in two
    groups, for a pattern of ``optimizer.adamw`` that names no matrix, and for QK-clip of a model that it cannot clip,
    or whose weights are frozen beside adapters.
    """
    section = config.optimizer
    spec: OptimizerSpec = optimizer_class(section.name).from_config(section, config.total_steps)
    if isinstance(spec, MatrixSpec):
        found = matrices(config.model) if config.adapters is None else _adapter_matrices(config)
        whole = _stepped_whole(spec, found)
        shapes = trained_shapes(config)
        spec = replace(spec, matrices=whole, columns={name: shapes[name][1] for name in whole})
    spec = replace(spec, scales=_scales(config, spec))
    if section.qk_clip is not None:
        if config.adapters is not None:
            raise UserError(
                f"optimizer.qk_clip = {section.qk_clip}: queries and keys are frozen beside the adapters of "
                f'adapter.name = "{config.adapter.name}"; remove optimizer.qk_clip'
            )
        try:
            spec = replace(spec, qk_clip=section.qk_clip, clipped_rows=clipped_rows(config.model))
        except UserError as error:
            raise UserError(f"optimizer.qk_clip = {section.qk_clip}: {error}") from None
    if section.adaptive_clip is not None:
        spec = replace(spec, adaptive_clip=section.adaptive_clip)
    if section.ema:
        spec = replace(spec, ema=section.ema)
    if section.groups:
        spec = replace(spec, groups=section.groups)
        _check_groups(spec, list(trained_shapes(config)))
    return spec


def full_checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of the tensors of a full checkpoint: fp32 weights and the optimizer's state."""
    spec = optimizer_spec(config)
    return _bytes(config, spec, spec.saved_bytes)


def held_bytes(config: RunConfig) -> int:
    """Bytes of the fp32 weights and the optimizer's state in memory, of all ranks together."""
    spec = optimizer_spec(config)
    return _bytes(config, spec, spec.state_bytes)


def _bytes(config: RunConfig, spec: OptimizerSpec, element_bytes: Callable[[str], int]) -> int:
    return sum(
        prod(shape) * (_WEIGHT_BYTES + element_bytes(name)) + spec.whole_bytes(name)
        for name, shape in trained_shapes(config).items()
    )


def _scales(config: RunConfig, spec: OptimizerSpec) -> dict[str, StepScale]:
    """Those of µP; none of weights beside frozen ones, whose ranks do not grow with the width."""
    if config.adapters is not None:
        return {}
    found = {}
    for name, scale in mup_scales(config.model).items():
        lr = scale.lr
        if isinstance(spec, MatrixSpec) and not spec.steps_like_adam and (parts := spec.matrix_shapes(name)):
            # All matrices of a parameter grow alike: heads are as wide at all widths.
            lr = scale.matrix_lr(*parts[0], spec.matrix_scale)
        found[name] = StepScale(lr=lr, eps=scale.eps)
    return found


def _adapter_matrices(config: RunConfig) -> dict[str, tuple[RowRanges, ...]]:
    """A and B of each adapter."""
    return {name: (((0, shape[0]),),) for name, shape in trained_shapes(config).items() if len(shape) == 2}


def _stepped_whole(spec: MatrixSpec, found: dict[str, tuple[RowRanges, ...]]) -> dict[str, tuple[RowRanges, ...]]:
    """Those of the matrices ``found`` that ``spec`` does not step element by element."""
    for pattern in spec.elementwise:
        if not any(fnmatchcase(one, pattern) for one in found):
            near = difflib.get_close_matches(pattern, found, n=1, cutoff=0.3) or list(found)[:1]
            raise UserError(
                f'optimizer.adamw: "{pattern}" is the name of no matrix of the model; a name is {near[0]}, and * is '
                "any text"
            )
    return {one: parts for one, parts in found.items() if not any(fnmatchcase(one, own) for own in spec.elementwise)}


def _check_groups(spec: OptimizerSpec, parameters: list[str]) -> None:
    for parameter in parameters:
        if len(groups := spec.groups_of(parameter)) > 1:
            raise UserError(
                f"optimizer.groups: {parameter} is in the groups {' and '.join(groups)}; change the patterns of one"
            )
    for name, group in spec.groups.items():
        for pattern in group.parameters:
            one = replace(spec, groups={name: group.model_copy(update={"parameters": [pattern]})})
            if not any(map(one.groups_of, parameters)):
                near = difflib.get_close_matches(pattern, parameters, n=1, cutoff=0.3) or parameters[:1]
                raise UserError(
                    f'optimizer.groups.{name}.parameters: "{pattern}" is the name of no parameter of the model; a name '
                    f"is {near[0]}, and * is any text"
                )
        if group.betas is not None and isinstance(spec, MatrixSpec) and not spec.steps_like_adam:
            for parameter in spec.matrices:
                if name in spec.groups_of(parameter):
                    raise UserError(
                        f"optimizer.groups.{name}.betas = {group.betas}: {parameter} is a matrix, whose step has no "
                        f"betas; remove them, or change optimizer.groups.{name}.parameters"
                    )
