"""A checkpoint as a directory that transformers loads: there whole or not at all.

DIR/model-….safetensors, model.safetensors.index.json   the weights, straight from the checkpoint's files
    config.json, generation_config.json                 the shape, and the tokens that begin and end documents
    modeling_lightscale.py                              the model in plain PyTorch; none for LLaMA
    tokenizer.json, tokenizer_config.json               the tokenizer as transformers reads it
    tokenizer/, run.toml                                 tokenizer and configuration as the run has them
    README.md                                           the model card
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from lightscale.config.files import to_toml
from lightscale.data_pipeline.whole_files import whole_directory
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun
from lightscale.exchange import export_config, model_card, modelling_file
from lightscale.exchange.export_reader import TOKENIZER
from lightscale.exchange.safetensors_files import Written, write_shards
from lightscale.exchange.tokenizer_files import write_tokenizer
from lightscale.exchange.trained import TrainedRun, open_run
from lightscale.exchange.weights import kept_dtype, tensor_shapes

RUN_CONFIG = "run.toml"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    directory: Path
    checkpoint: Path
    num_parameters: int
    num_bytes: int
    """Of the tensors."""
    files: tuple[str, ...]
    refused: tuple[str, ...]
    """Why newer checkpoints were skipped, one line each."""


def check_target(target: Path) -> None:
    """UserError where something is at ``target`` already, or where no directory can be made there."""
    if os.path.lexists(target):
        raise UserError(f"--to {target}: there is something already; an export is written to a new directory")
    parent = target.resolve().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UserError(f"--to {target}: {parent} is no directory")


def export(chosen: ChosenRun, target: Path, *, dtype: str = "bf16", shard_bytes: int = 5_000_000_000) -> Exported:
    """Write the chosen checkpoint to the new directory ``target``, in the number format ``dtype``.

    Memory does not grow with the model: tensors pass from file to file some rows at a time.

    Raises:
        UserError: something is at ``target``; no checkpoint is whole; a mixer or tokenizer that cannot be exported;
            in fp16, weights that are too large for it. Nothing is at ``target`` then.
    """
    check_target(target)
    run = open_run(chosen)
    check_space(target, run, _DTYPES[dtype])
    with whole_directory(target) as draft:
        files = _write(draft, run, dtype=dtype, shard_bytes=shard_bytes)
        # Another export to the same place must not be lost silently in the moment of the rename.
        check_target(target)
    shapes = tensor_shapes(run.shape)
    return Exported(
        directory=target,
        checkpoint=run.origin,
        num_parameters=sum(map(math.prod, shapes.values())),
        num_bytes=sum(tensor.num_bytes for tensor in _tensors(run, _DTYPES[dtype])),
        files=tuple(files),
        refused=run.refused,
    )


def check_space(target: Path, run: TrainedRun, dtype: torch.dtype) -> None:
    """UserError where the disk of ``target`` has less space than the tensors take."""
    parent = target.resolve().parent
    while not parent.exists():
        parent = parent.parent
    status = os.statvfs(parent)
    free, needed = status.f_bavail * status.f_frsize, sum(one.num_bytes for one in _tensors(run, dtype))
    if free < needed:
        raise UserError(f"--to {target}: the export takes {needed:,} bytes, and {free:,} are free on its disk")


def _write(draft: Path, run: TrainedRun, *, dtype: str, shard_bytes: int) -> list[str]:
    config, shape = run.chosen.config, run.shape
    max_tokens, eot_id = config.data.sequence_length, run.tokenizer.eot_id
    numbers = str(_DTYPES[dtype]).removeprefix("torch.")
    # What may be refused comes before what takes long.
    write_tokenizer(run.tokenizer, draft, max_tokens=max_tokens)
    (draft / TOKENIZER).mkdir()
    run.tokenizer.save(draft / TOKENIZER)
    tensors = _tensors(run, _DTYPES[dtype])
    settings = export_config.config_of(
        shape, eot_id=eot_id, dtype=numbers, max_tokens=max_tokens, init_std=config.model.init_std
    )
    generation = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    num_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    texts = {
        export_config.NAME: _json(settings),
        "generation_config.json": _json(generation),
        RUN_CONFIG: to_toml(config),
        model_card.NAME: model_card.model_card(run, num_parameters=num_parameters, dtype=numbers),
    }
    if not export_config.is_llama(shape):
        texts[modelling_file.NAME] = modelling_file.modelling_file()
    for name, text in texts.items():
        (draft / name).write_text(text, encoding="utf-8")
    return [*texts, *write_shards(draft, tensors, shard_bytes=shard_bytes)]


def _tensors(run: TrainedRun, dtype: torch.dtype) -> list[Written]:
    return [
        Written(
            name=export_config.tensor_name(run.shape, name),
            dtype=kept_dtype(name, dtype),
            shape=run.tensors.shape(rows),
            blocks=run.tensors.blocks(rows),
        )
        for name, rows in run.rows.items()
    ]


def _json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"
