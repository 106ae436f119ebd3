"""Export of a checkpoint to a directory for transformers; the directory appears only when complete.

DIR/model-….safetensors, model.safetensors.index.json   the weights, straight from the checkpoint's files
    config.json, generation_config.json                 the shape, and the tokens that begin and end documents;
                                                        the second of models that generate
    modeling_lightscale.py                              the model in plain PyTorch; none for transformers' own or fla's
    tokenizer.json, tokenizer_config.json               the tokenizer as transformers reads it
    preprocessor_config.json                            of images instead: how their pixels are scaled
    chat_template.jinja, chat.json                      of conversations: the template for transformers, and the run's
    tokenizer/, run.toml                                 tokenizer and configuration as the run has them
    README.md                                           the model card
    XXH128SUMS                                          the hash of each file but the model card

Adapters are put into the weights, or are a directory of PEFT's: adapter_model.safetensors and adapter_config.json, with
tokenizer, chat template and XXH128SUMS. Runs that draw images have the layout of diffusers (``diffusers_format.py``).
"""

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightscale.config.files import to_toml
from lightscale.config.schema import AdapterConfig
from lightscale.data_pipeline.whole_files import whole_directory
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun
from lightscale.exchange import model_card, peft_format
from lightscale.exchange.chat.markup import Markup
from lightscale.exchange.export_reader import TOKENIZER
from lightscale.exchange.files import export_config
from lightscale.exchange.files.chat_template import write_chat_template
from lightscale.exchange.files.checksums import write_checksums
from lightscale.exchange.files.safetensors_files import write_file, write_shards
from lightscale.exchange.files.tokenizer_files import write_tokenizer
from lightscale.exchange.files.weights import run_shape
from lightscale.exchange.formats import ExportFormat, format_named, usual_format
from lightscale.exchange.trained import TrainedRun, open_run
from lightscale.files import existing_part
from lightscale.training.health.limits import require_file_size

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
    notes: tuple[str, ...] = ()
    """What the export lacks, one line each."""


def check_target(target: Path) -> None:
    """Raise ``UserError`` if ``target`` exists or cannot be created."""
    if os.path.lexists(target):
        raise UserError(f"--to {target}: it exists; use a new directory")
    parent = next(part for part in target.resolve().parents if part.exists())
    if not parent.is_dir():
        raise UserError(f"--to {target}: {parent} is not a directory")


def export(
    chosen: ChosenRun,
    target: Path,
    *,
    dtype: str = "bf16",
    shard_bytes: int = 5_000_000_000,
    format_name: str | None = None,
    adapters: Literal["merge", "alone"] = "merge",
    base: str | None = None,
    average: str | None = None,
) -> Exported:
    """Write the chosen checkpoint to the new directory ``target``, in the number format ``dtype``.

    Memory does not grow with the model: tensors pass from file to file some rows at a time.

    Args:
        adapters: of a run that trained these, whether they are put into the weights, or are all that is written.
        format_name: one of ``FORMATS``; None: the usual one of the run's task.
        base: path or name of the exported base, for the configuration of ``adapters`` alone.
        average: name in ``optimizer.ema`` of the average that is exported in place of the weights.

    Raises:
        UserError: something is at ``target``; no checkpoint is whole; a mixer or tokenizer that cannot be exported, or
            not as ``format_name``; no such average; in fp16, weights too large for it. Nothing is at ``target`` then.
    """
    check_target(target)
    if average is not None:
        chosen.require_average(average)
    shape = run_shape(chosen.config, num_ids=chosen.tokenizer.vocab_size)
    wanted = format_named(format_name or usual_format(shape.task == "diffusion"))
    wanted.check(shape)
    run = open_run(chosen, average=average)
    if adapters == "alone":
        return _export_adapters(run, target, _DTYPES[dtype], base)
    tensors = wanted.tensors(run, _DTYPES[dtype])
    num_parameters, num_bytes = sum(math.prod(one.shape) for one in tensors), sum(one.num_bytes for one in tensors)
    check_space(target, num_bytes, shard_bytes)
    with whole_directory(target, others_are_equal=False) as draft:
        # What may be refused comes before what takes long.
        notes = _write_tokenizer(draft, run)
        texts = _texts(run, wanted, num_parameters=num_parameters, dtype=dtype)
        for name, text in texts.items():
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_text(text, encoding="utf-8")
        shards = write_shards(draft / wanted.folder, tensors, shard_bytes=shard_bytes, stem=wanted.stem)
        files = [*texts, *(f"{wanted.folder}{name}" for name in shards)]
        files.append(write_checksums(draft))
    return Exported(
        directory=target,
        checkpoint=run.origin,
        num_parameters=num_parameters,
        num_bytes=num_bytes,
        files=tuple(files),
        refused=run.refused,
        notes=notes,
    )


def _export_adapters(run: TrainedRun, target: Path, dtype: torch.dtype, base: str | None) -> Exported:
    text, tensors = peft_format.peft_adapter(run, dtype, base)
    num_bytes = sum(one.num_bytes for one in tensors)
    check_space(target, num_bytes, num_bytes)
    with whole_directory(target, others_are_equal=False) as draft:
        notes = _write_tokenizer(draft, run)
        (draft / peft_format.CONFIG).write_text(text, encoding="utf-8")
        write_file(draft / peft_format.TENSORS, tensors)
        write_checksums(draft)
    return Exported(
        directory=target,
        checkpoint=run.origin,
        num_parameters=sum(math.prod(one.shape) for one in tensors),
        num_bytes=num_bytes,
        files=(peft_format.CONFIG, peft_format.TENSORS),
        refused=run.refused,
        notes=notes,
    )


def check_space(target: Path, num_bytes: int, shard_bytes: int) -> None:
    """Raise ``UserError`` if the disk of ``target`` has too little space for the tensors, or a file may not have it."""
    require_file_size(min(num_bytes, shard_bytes), "use a smaller --shard-size")
    free = shutil.disk_usage(existing_part(target.resolve())).free
    if free < num_bytes:
        raise UserError(f"--to {target}: the export needs {num_bytes:,} bytes, and {free:,} are free on its disk")


def _write_tokenizer(draft: Path, run: TrainedRun) -> tuple[str, ...]:
    """Write tokenizer and chat template; a sentence for what is not written."""
    if run.shape.image is not None:
        (draft / TOKENIZER).mkdir()
        run.tokenizer.save(draft / TOKENIZER)
        return ()
    eot = write_tokenizer(
        run.tokenizer,
        draft,
        max_tokens=run.chosen.config.data.sequence_length,
        has_mask=run.shape.task == "masked",
        reads_markup=run.reads_markup,
    )
    (draft / TOKENIZER).mkdir()
    run.tokenizer.save(draft / TOKENIZER)
    note = None if run.chat is None else write_chat_template(run.chat, run.tokenizer, eot, draft)
    return () if note is None else (note,)


def _texts(run: TrainedRun, wanted: ExportFormat, *, num_parameters: int, dtype: str) -> dict[str, str]:
    """What stands beside tensors and tokenizer, by its name."""
    config, shape = run.chosen.config, run.shape
    numbers = str(_DTYPES[dtype]).removeprefix("torch.")
    facts = export_config.ConfigFacts(
        eot_id=run.tokenizer.eot_id,
        dtype=numbers,
        max_tokens=config.data.sequence_length,
        init_std=config.model.init_std,
        classes=run.classes,
    )
    settings = wanted.config(shape, facts)
    usage = wanted.usage(shape)
    return {
        f"{wanted.folder}{export_config.NAME}": _json(settings),
        **({"generation_config.json": _json(_generation(settings, run))} if shape.task == "causal" else {}),
        # The exported model is whole.
        RUN_CONFIG: to_toml(config.model_copy(update={"adapter": AdapterConfig()})),
        model_card.NAME: model_card.model_card(run, num_parameters=num_parameters, dtype=numbers, usage=usage),
        **wanted.beside(run),
    }


def _generation(settings: dict[str, Any], run: TrainedRun) -> dict[str, Any]:
    found = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if run.chat is not None and run.reads_markup:
        # An answer ends with its turn, and a document with the end of text.
        found["eos_token_id"] = sorted({found["eos_token_id"], *Markup(run.chat, run.tokenizer).end_ids})
    return found


def _json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"
