"""The checks of ``task.teacher`` that two configurations suffice for."""

from lightscale.config.layout import check_mixers, check_tensor
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.config.tasks import task_class
from lightscale.errors import UserError
from lightscale.models.accounting import norm_placement
from lightscale.runs.base import refuse_adapters
from lightscale.runs.teacher import teacher_config, teacher_run
from lightscale.tasks.distill import DistillConfig
from lightscale.training.checkpoints.directories import checkpoints_of_step


def check_teacher(config: RunConfig) -> None:
    """Raise UserError if ``config`` cannot learn from its teacher, or if the teacher's checkpoint is missing."""
    found = teacher_config(config)
    if found is None:
        return
    directory, step = teacher_run(config)
    try:
        checkpoints_of_step(directory.checkpoints, step)
        refuse_adapters(directory, "task.teacher")
        if not task_class(found.task.name).writes_text:
            raise UserError(f'its task.name = "{found.task.name}" does not predict the next token; use a causal model')
        if found.model.vocab_size != config.model.vocab_size:
            raise UserError(
                f"its model.vocab_size is {found.model.vocab_size} and that of this run {config.model.vocab_size}; use "
                f"model.vocab_size={found.model.vocab_size}"
            )
        if found.model.grid != config.model.grid:
            raise UserError("its model.grid is not that of this run; use the same documents for both")
        check_mixers(found.model, config.parallel)
        check_tensor(found.model, config.parallel)
        if isinstance(config.task, DistillConfig) and config.task.stage == "layers":
            _check_layers(config.model, found.model)
            if config.train.recompute != "none":
                raise UserError(
                    f'train.recompute = "{config.train.recompute}": task.stage = "layers" keeps the activations of its '
                    "mixers; use train.recompute=none, and a smaller train.micro_batch_size where memory is short"
                )
    except UserError as error:
        raise UserError(f'task.teacher = "{config.teacher}": {error}') from None


def converted_layers(student: ModelConfig, teacher: ModelConfig) -> list[int]:
    """The layers of ``student`` with another mixer than the teacher's there, or other options of it, from 0."""
    kinds = (
        [(name, model.layer_options(layer)) for layer, name in enumerate(model.layers)] for model in (student, teacher)
    )
    return [layer for layer, (own, other) in enumerate(zip(*kinds, strict=True)) if own != other]


def _check_layers(student: ModelConfig, teacher: ModelConfig) -> None:
    for key in ("num_layers", "hidden_size"):
        there, here = getattr(teacher, key), getattr(student, key)
        if there != here:
            raise UserError(
                f'its model.{key} is {there} and that of this run {here}; task.stage = "layers" needs equal values: '
                f'use model.{key}={there}, or task.stage = "logits"'
            )
    converted = converted_layers(student, teacher)
    for layer in converted:
        there, here = (norm_placement(model, model.layers[layer]) for model in (teacher, student))
        if there != here:
            raise UserError(
                f"its layer {layer} has norms placed {there!r} and that of this run {here!r}: outputs of their mixers "
                'are not added alike; use the teacher\'s model.norm_placement, or task.stage = "logits"'
            )
    if not converted:
        raise UserError(
            'task.stage = "layers" trains mixers that the teacher lacks, but all mixers are the teacher\'s; change '
            'model.mixer, or use task.stage = "logits"'
        )
