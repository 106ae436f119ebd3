"""The options that are drawn: every field of what a layout can change, of every mixer, task and optimizer.

A field's values are those of its type: both of a bool, all of a Literal; of numbers those that ``NUMBERS`` names. A
new option is drawn without a change here, unless it is a number: then ``undrawn`` names it, and a test asks for values
or a reason.
"""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel

from lightscale.config.mixers import MIXERS, mixer_options_type
from lightscale.config.model import GridConfig, ModelConfig
from lightscale.config.optimizers import OPTIMIZERS, optimizer_class
from lightscale.config.schema import AdapterConfig, DataConfig, ParallelConfig, TrainConfig
from lightscale.config.tasks import TASKS, task_class

STEPS = 3
TOKENS = 48
NUM_IDS = 128
"""Of the tokenizer of the stores (``ascii``)."""

NUMBERS: dict[str, list[Any]] = {
    # The masked task has an id more than the tokenizer; tensor ranks divide neither 131 nor 301.
    "model.vocab_size": [131, 160, 301],
    "model.num_layers": [2, 4],
    "model.hidden_size": [24, 32, 48],
    "model.num_heads": [2, 4, 8],
    "model.intermediate_size": [0, 24, 40],
    "model.norm_eps": [1e-6, 1e-3],
    "model.init_std": [0.02, 0.1],
    "model.embedding_std": [None, 0.5],
    "model.mup.base_hidden_size": [16, 32],
    "model.mup.base_num_layers": [None, 1],
    "model.mup.depth_exponent": [1.0, 0.5],
    "model.head.num_labels": [3],
    "model.diffusion.num_labels": [3],
    "model.diffusion.timestep_width": [256, 6],
    "model.tpe.modes": [None, 3],
    # Documents of 24 or 48 tokens: those of text are short or fill a sequence, images fill one.
    "model.grid": [
        None,
        {"shape": [6, 8], "leading_tokens": 0},
        {"shape": [5, 9], "leading_tokens": 3},
        {"shape": [3, 7], "leading_tokens": 3},
        {"shape": [23], "leading_tokens": 1},
        {"shape": [2, 2, 6], "leading_tokens": 0},
    ],
    "model.patches.size": [[2, 2], [1, 3]],
    "model.patches.overlap": [0, 0, 1],
    "model.patches.channels": [1, 3],
    "model.patches.mean": [[0.5], [0.1, 0.2, 0.3]],
    "model.patches.std": [[0.5], [0.5, 0.6, 0.7]],
    "gate_rank": [None, 3],
    "num_key_value_heads": [None, 1, 2, 4],
    "head_dim": [None, 6],
    "key_head_dim": [None, 5],
    "value_head_dim": [None, 6],
    "num_value_heads": [None, 8, 16],
    "rope_theta": [10000.0, 100.0],
    "rope_scaling.factor": [8.0],
    "rope_fraction": [1.0, 0.5],
    "window": [None, 5, 20],
    "softmax_scale": [None, 0.7],
    "attention_logit_cap": [None, 2.0],
    "model.embedding_multiplier": [1.0, 5.0],
    "model.final_logit_cap": [None, 2.0],
    "rope_scaling.low_freq_factor": [1.0, None],
    "rope_scaling.high_freq_factor": [4.0, None],
    "rope_scaling.original_max_position_embeddings": [16],
    "rope_scaling.beta_fast": [None, 4.0],
    "rope_scaling.beta_slow": [None],
    "rope_scaling.attention_factor": [None],
    "eps": [1e-6, 0.1],
    "model.mixer_options.lion-s.initial_decay": [0.5, 0.9, "s4d-real"],
    "initial_decay": [0.5, 0.9],
    "short_convolution": [0, 2, 4],
    "output_norm_eps": [1e-5, 0.1],
    "expansion": [1, 2],
    "positions": [None, TOKENS],
    "task.mlm_probability": [0.15, 0.5],
    "task.mask_replace_prob": [0.8, 0.5],
    "task.random_replace_prob": [0.1, 0.3],
    "task.timesteps": [1000, 10],
    "task.label_dropout": [0.1, 0.5],
    "task.label_smoothing": [0.0, 0.2],
    "task.augmentation": [
        {},
        {"horizontal_flip": 0.5},
        {"horizontal_flip": 0.5, "rand_augment_ops": 2, "mixup_alpha": 0.8},
        {"crop_scale": [0.2, 1.0], "random_erasing": 0.5, "cutmix_alpha": 1.0},
    ],
    # The first of three steps is of shorter sequences.
    "data.curriculum": [[], [{"sequence_length": TOKENS // 2, "until_tokens": 1}]],
    # The first of three steps has half of the others' sequences.
    "train.rampup_batch_size": [[], [{"global_batch_size": 4, "until_tokens": 1}]],
    "train.micro_batch_size": [1, 2],
    "train.recompute_layers": [None, 1],
    "train.z_loss_multiplier": [0.0, 0.1],
    "optimizer.weight_decay": [0.1, 0.0],
    "optimizer.grad_clip": [1.0, 0.1],
    "adaptive_clip.z_score": [2.5, 0.01],
    "adaptive_clip.decay": [0.97, 0.5],
    # The third step is clipped.
    "adaptive_clip.warmup_steps": [2],
    "optimizer.groups": [
        {},
        {"first": {"parameters": ["embedding.*"], "lr_factor": 0.5, "weight_decay": 0.0, "grad_clip": 0.01}},
    ],
    "optimizer.qk_clip": [None, 0.01],
    "optimizer.ema": [{}, {"slow": 0.9, "fast": 0.5}],
    "optimizer.alpha": [5.0, 0.0],
    "optimizer.slow_warmup_steps": [None, 2],
    "optimizer.newton_schulz_steps": [5, 2],
    "optimizer.adamw": [[], ["*_proj.weight"]],
    "optimizer.precondition_frequency": [10, 1],
    "optimizer.max_precond_dim": [10_000, 16],
    "task.beta": [0.1, 0.5],
    "task.gamma": [0.5, 0.0],
    "adapter.name": ["lora", "dora"],
    "adapter.r": [1, 3],
    "adapter.lora_alpha": [2.0, 6.0],
    "adapter.lora_dropout": [0.0, 0.25],
    "adapter.target_modules": [["*"], ["*.mixer.*"]],
}
"""By the key, or its last part."""

IMAGE_GRIDS = [
    grid
    for grid in NUMBERS["model.grid"]
    if grid is not None and len(grid["shape"]) == 2 and GridConfig(**grid).document_tokens == TOKENS
]
"""Those that an image of ``TOKENS`` can have."""

NOT_DRAWN: dict[str, str] = {
    "model.mixer": "drawn as the pattern of the layers",
    "model.mixer_options": "drawn for each mixer",
    "model.head": "drawn with tasks that predict labels, and then always",
    "model.diffusion": "drawn with tasks that predict noise, and then always",
    "model.patches": "drawn with images, and then always",
    "task.name": "drawn first",
    "task.label": "the name of the store's array",
    "task.teacher": "a run of another model: tests/training/test_distillation.py compares layouts with a teacher",
    "task.stage": "as task.teacher",
    "task.reference": "a store that a reference has filled: tests/training/test_preference_runs.py compares it bitwise",
    "task.temperature": "as task.teacher",
    "task.cross_entropy_weight": "as task.teacher",
    "data.store": "the one that the task and the grid need",
    "data.stores": "several read as one: tests/data_pipeline/loading compares their order on layouts",
    "data.sources": "as data.stores",
    "data.sequence_length": "48 tokens, which all layouts of 2 to 4 ranks divide",
    "data.packing": "drawn with the task",
    "data.seed": "decides the numbers, not how they come about",
    "data.validation": "of validation, which the fuzzer does not do",
    "task.seed": "decides the numbers, not how they come about",
    "task.validation_mlm_probability": "of validation, which the fuzzer does not do",
    "train.steps": "three",
    "train.tokens": "as train.steps",
    "train.global_batch_size": "drawn with the layout, which must divide it",
    "train.seed": "decides the numbers, not how they come about",
    "train.device": "the fuzzer is for CPUs",
    "train.kernels": "back-ends are compared operator by operator (tests/kernels)",
    "train.precision": "fp64 for comparisons, fp32 with the optimizer",
    "train.validate_every": "of validation, which the fuzzer does not do",
    "train.init_from": "set with adapters and references, which begin with the model's initial weights here",
    "train.branch_from": "changes what training begins with",
    "train.profile_steps": "measures",
    "train.stop_step": "an end and a resume, as the fuzzer's own (tests/training/test_stop_step.py)",
    "optimizer.name": "drawn before its options",
    "optimizer.lr": "the schedule is a function of the step (tests/training)",
    "optimizer.schedule": "as optimizer.lr",
    "optimizer.warmup_steps": "as optimizer.lr",
    "optimizer.decay_steps": "as optimizer.lr",
    "optimizer.decay": "as optimizer.lr",
    "optimizer.decay_power": "as optimizer.lr",
    "optimizer.min_lr_ratio": "as optimizer.lr",
    "optimizer.betas": "element by element",
    "optimizer.eps": "element by element",
    "optimizer.momentum": "element by element",
    "parallel.tensor": "drawn as the layout",
    "parallel.pipeline": "drawn as the layout",
    "parallel.sequence": "drawn as the layout",
    "parallel.data": "the rest of the ranks",
    "parallel.virtual_stages": "drawn with the layout",
    "parallel.ranks_per_node": "drawn with the exchange",
}
"""Fields that are not drawn by themselves, and why."""


DRAWN_TASKS = sorted(name for name in TASKS if "teacher" not in task_class(name).options.model_fields)
"""Names of the tasks that are drawn; see ``task.teacher`` in ``NOT_DRAWN``."""


def tables() -> dict[str, type[BaseModel]]:
    """What is drawn from: the prefix of its keys, and its type. Of each mixer and each task its own."""
    found: dict[str, type[BaseModel]] = {
        "model": ModelConfig,
        "data": DataConfig,
        "train": TrainConfig,
        "parallel": ParallelConfig,
        "adapter": AdapterConfig,
    }
    found |= {f"task:{name}": task_class(name).options for name in TASKS}
    found |= {f"optimizer:{name}": optimizer_class(name).options for name in OPTIMIZERS}
    for name in MIXERS:
        options = mixer_options_type(name)
        if options is not None:
            found[f"model.mixer_options.{name}"] = options
    for prefix, kind in list(found.items()):
        found |= _inner_tables(prefix, kind)
    return found


def _inner_tables(prefix: str, kind: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found: dict[str, type[BaseModel]] = {}
    for name, one in kind.model_fields.items():
        if (inner := _table_of(one.annotation)) is not None:
            found |= {f"{prefix}.{name}": inner} | _inner_tables(f"{prefix}.{name}", inner)
    return found


def _table_of(annotation: Any) -> type[BaseModel] | None:
    """The type of a table that is there or not; None: the field is no such table."""
    inner = [one for one in typing.get_args(annotation) if one is not type(None)]
    is_table = len(inner) == 1 and isinstance(inner[0], type) and issubclass(inner[0], BaseModel)
    return inner[0] if is_table and typing.get_origin(annotation) in (typing.Union, types.UnionType) else None


def values_of(key: str, annotation: Any) -> list[Any] | None:
    """What a field may be drawn as, a type for a table; None: not known here."""
    last = key.rpartition(".")[2]
    for known in (key, ".".join(key.split(".")[-2:])):
        if known in NUMBERS:
            return NUMBERS[known]
    if annotation is bool:
        return [False, True]
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    if (table := _table_of(annotation)) is not None:
        return [None, table]
    if typing.get_origin(annotation) is typing.Annotated:
        return values_of(key, typing.get_args(annotation)[0])
    return NUMBERS.get(last)


def options() -> Iterator[tuple[str, Any]]:
    """Keys that are drawn, with each of their values."""
    yield from (("model.mixer", name) for name in MIXERS)
    yield from (("task.name", name) for name in DRAWN_TASKS)
    yield from (("optimizer.name", name) for name in OPTIMIZERS)
    for table, kind in tables().items():
        if table in NUMBERS:
            continue
        prefix = _prefix(table)
        for name, one in kind.model_fields.items():
            key = f"{prefix}.{name}"
            if key not in NOT_DRAWN:
                yield from (
                    (key, value) for value in values_of(key, one.annotation) or [] if not isinstance(value, type)
                )


def _prefix(table: str) -> str:
    """Of the keys: "task" of "task:causal"."""
    first, _, rest = table.partition(".")
    return ".".join([first.partition(":")[0], *rest.split(".")] if rest else [first.partition(":")[0]])


def undrawn() -> list[str]:
    """Keys that are neither drawn nor in ``NOT_DRAWN``."""
    found = []
    for table, kind in tables().items():
        for name, one in kind.model_fields.items():
            key = f"{_prefix(table)}.{name}"
            # Tables that are drawn whole.
            whole = any(value is not None and name in value for value in NUMBERS.get(table, ()))
            if not whole and key not in NOT_DRAWN and values_of(key, one.annotation) is None:
                found.append(key)
    return found
