"""Import of an exported directory as a run: configuration, tokenizer and a checkpoint of the weights at step 0.

The weights of a run exported in fp32 return bit for bit. `evaluate`, `generate`, `train.init_from` and
`export` take it as any other run. Nothing in the directory is executed, and tensors pass from file to file.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightscale.config.files import load
from lightscale.config.mixers import mixer_options_type
from lightscale.config.model import ModelConfig
from lightscale.config.schema import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from lightscale.config.section import Section
from lightscale.config.tasks import task_class
from lightscale.data_pipeline.whole_files import whole_directory
from lightscale.errors import UserError
from lightscale.exchange.export import RUN_CONFIG
from lightscale.exchange.export_reader import Export, open_export
from lightscale.exchange.files.weights import Part, run_shape, stored_parts, tensor_shapes
from lightscale.exchange.files.written_run import write_run
from lightscale.exchange.plain.model import Shape
from lightscale.exchange.plain.relation import RELATION_MIXERS
from lightscale.exchange.plain.toeplitz import ToeplitzForm
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import directory_name

STEP = 0
"""Of the imported checkpoint: RUN@0."""
_PADDING_STD = 0.02
"""Standard deviation of the padding rows' weights, as Megatron and transformers draw embeddings."""
_ROWS_MULTIPLE = 8
"""TensorRows of the embedding are filled up to a multiple of it, so that tensor ranks can share them out."""


def import_model(directory: Path, target: Path) -> Path:
    """Write the model in ``directory`` as the new run ``target``; its checkpoint.

    UserError where something is at ``target``, or ``directory`` has no model that can be read; nothing is written then.
    """
    if os.path.lexists(target):
        raise UserError(f"--run {target}: it exists; use a new run")
    export = open_export(directory)
    config = _config(export)
    parts, sizes = stored_parts(config.model, vocab_size=export.shape.vocab_size), tensor_shapes(export.shape)
    shapes = {key: (held[-1].rows.stop, *sizes[held[0].name or ""][1:]) for key, held in parts.items()}
    with whole_directory(target, others_are_equal=False) as draft:
        write_run(
            draft,
            config,
            export.tokenizer,
            classes=export.classes,
            chat=export.chat,
            shapes=shapes,
            blocks=_blocks(export, shapes, parts),
            step=STEP,
            tokens=0,
            reason=f"imported from {directory.name}",
        )
    return RunDirectory(target).checkpoints / directory_name(STEP, "weights")


def _config(export: Export) -> RunConfig:
    """The configuration of the exported run, where it is beside the model; else one of the model alone."""
    path, shape = export.origin / RUN_CONFIG, export.shape
    if path.is_file():
        config = load(path)
        found = run_shape(config, num_ids=export.tokenizer.vocab_size)
        if config.model.vocab_size < shape.vocab_size or found != shape:
            raise UserError(f"{path}: its model differs from config.json in the same directory; remove the file")
        return config
    return RunConfig(
        model=model_of(shape),
        # Data and optimizer are those of whoever trains it on, in a run of its own with train.init_from.
        data=DataConfig(store=Path("imported"), sequence_length=export.max_tokens),
        optimizer=OptimizerConfig(lr=3e-4),
        train=TrainConfig(steps=1, global_batch_size=1),
        task=task_class(shape.task).options(),
    )


def model_of(shape: Shape) -> ModelConfig:
    """The ``[model]`` of an export that has no run's configuration beside it."""
    mixers = list(shape.mixers)
    options: dict[str, dict[str, Any]] = {name: {"gate_rank": rank} for name, rank in shape.gate_ranks.items()}
    if "lightnet" in mixers:
        options.setdefault("lightnet", {})["causal"] = shape.lightnet_causal
    for name in {*RELATION_MIXERS} & {*mixers} if shape.learned_positions else ():
        options.setdefault(name, {})["positions"] = shape.learned_positions
    for name, form in (*shape.lion.items(), *shape.forms.items()):
        # Only LION-S has gates, and only CausalRN goes without its norm.
        known = (mixer_options_type(name) or Section).model_fields
        own = {field: value for field, value in asdict(form).items() if field in known}
        options[name] = options.get(name, {}) | own
    for name, attention in shape.attentions().items():
        known = (mixer_options_type(name) or Section).model_fields
        options[name] = {
            **{field: value for field, value in asdict(attention).items() if field in known},
            "attention_bias": "all" if attention.output_bias else "qkv" if attention.bias else "none",
        }
    if (name := "decay-attention") in mixers:
        options[name] = asdict(shape.scalar_decay) | options.get(name, {})
    return ModelConfig.model_validate(
        {
            "mixer": mixers[0] if len({*mixers}) == 1 else mixers,
            "num_layers": len(mixers),
            "hidden_size": shape.hidden_size,
            "num_heads": shape.num_attention_heads,
            "intermediate_size": shape.intermediate_size,
            "vocab_size": -(-shape.vocab_size // _ROWS_MULTIPLE) * _ROWS_MULTIPLE,
            **_of_image(shape),
            "tie_word_embeddings": shape.tied,
            "glu_activation": shape.glu_activation,
            "gated_linear_unit": shape.gated_linear_unit,
            "mlp_bias": shape.mlp_bias,
            "norm": shape.norm,
            "norm_elementwise_affine": shape.norm_elementwise_affine,
            "norm_placement": shape.norm_placement,
            "zero_centered_norm": shape.zero_centered_norm,
            "embedding_multiplier": shape.embedding_multiplier,
            "final_logit_cap": shape.final_logit_cap,
            "norm_eps": shape.rms_norm_eps,
            "final_norm": shape.final_norm,
            "tpe": None if shape.toeplitz == ToeplitzForm() else asdict(shape.toeplitz),
            "head": {"num_labels": shape.num_labels, "pooling": shape.pooling, "bias": shape.head_bias}
            if shape.num_labels
            else None,
            "mixer_options": options,
        }
    )


def _of_image(shape: Shape) -> dict[str, Any]:
    """The tables of images."""
    if (image := shape.image) is None:
        return {}
    return {
        "grid": {"shape": list(image.grid), "leading_tokens": image.leading_tokens},
        "patches": {
            "size": list(image.patch_size),
            "overlap": image.overlap,
            "channels": image.num_channels,
            "mean": list(image.image_mean),
            "std": list(image.image_std),
            "learned_positions": shape.learned_positions > 0,
        },
    }


def _blocks(
    export: Export, shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, list[Part]]
) -> Iterator[memoryview]:
    generator = torch.Generator().manual_seed(0)
    for key, held in parts.items():
        for part in held:
            if part.name is None:
                # Padding rows take no probability. But one may become a mask, and the first norm would scale a row of
                # zeros up without end.
                rows_shape = (len(part.rows), *shapes[key][1:])
                drawn = torch.empty(rows_shape).normal_(std=_PADDING_STD, generator=generator)
                yield drawn.view(-1).view(torch.uint8).numpy().data
                continue
            rows = export.rows(part.name)
            for block in export.tensors.blocks(rows.part(part.first, len(part.rows))):
                yield block.float().reshape(-1).view(torch.uint8).numpy().data
