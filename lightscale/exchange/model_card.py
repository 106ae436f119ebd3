"""README.md of an export: the model, its data and training, and instructions to load it."""

import json
import math

import xxhash

from lightscale.config.optimizers import optimizer_class
from lightscale.config.schema import RunConfig
from lightscale.config.tasks import task_class
from lightscale.exchange.plain.model import SOFTMAX_MIXERS
from lightscale.exchange.trained import TrainedRun
from lightscale.records import read_records
from lightscale.runs.run_directory import RunDirectory

NAME = "README.md"
_PIPELINES = {
    "causal": "text-generation",
    "masked": "fill-mask",
    "classify": "text-classification",
    "classify-image": "image-classification",
    "diffusion": "unconditional-image-generation",
}
_KINDS = {
    "causal": "A language model",
    "masked": "A model that fills masks from the text before and after them,",
    "classify": "A model that classifies texts,",
    "classify-image": "A model that classifies images,",
    "diffusion": "A diffusion transformer that draws images of given classes,",
}


def model_card(run: TrainedRun, *, num_parameters: int, dtype: str, usage: str) -> str:
    """The text of the card, from the records of the run; ``usage``: how the export is loaded."""
    config, shape = run.chosen.config, run.shape
    model = config.model
    mixer = model.mixer if isinstance(model.mixer, str) else ", ".join(model.mixer)
    tokens = run.manifest.facts.get("tokens", 0)
    optimizer = optimizer_class(config.optimizer.name).__name__
    sources = ", ".join(config.data.sources) or "all sources of the store"
    rows = {
        "task": _task(run),
        "token mixer": f"{mixer} ({len(shape.mixers)} layers)",
        "parameters": f"{num_parameters:,}",
        "width, heads, inner width": f"{model.hidden_size}, {model.num_heads}, {model.intermediate_size}",
        **_inputs(run),
        "numbers": dtype,
        **(
            {}
            if run.average is None
            else {"weights": f"average {run.average} of {config.optimizer.ema[run.average]:g}"}
        ),
        "trained on": f"{', '.join(path.name for path in config.data.store_paths.values())}: {sources}",
        "steps, tokens": f"{run.step:,}, {tokens:,}",
        **({} if shape.image else {"sequence length": f"{config.data.sequence_length:,} tokens"}),
        "optimizer": f"{optimizer}, lr {config.optimizer.lr:g}, {config.optimizer.schedule}",
        **_measured(run.chosen.directory, run.step),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: {"diffusers" if shape.task == "diffusion" else "transformers"}
pipeline_tag: {_PIPELINES[shape.task]}
tags: [lightscale, linear-attention]
---

# {run.chosen.directory.path.resolve().name}, step {run.step}

{_KINDS[shape.task]} trained with lightscale {run.manifest.facts["versions"].get("lightscale", "")}. {_about(config)}

| | |
|---|---|
{table}

{usage}

{_reading(run)}

Checkpoint: manifest {_manifest_hash(run)}.
"""


def _inputs(run: TrainedRun) -> dict[str, str]:
    """Rows of the table: ids, or images."""
    shape = run.shape
    if (image := shape.image) is None:
        return {"vocabulary": f"{shape.vocab_size:,} ids, tokenizer {run.tokenizer.name}"}
    height, width = image.image_size
    h, w = image.patch_size
    tokens = f"{image.tokens} tokens, {image.leading_tokens} of them before the patches"
    overlap = f" that overlap by {image.overlap}" if image.overlap else ""
    return {"images": f"{height} x {width} x {image.num_channels}, patches of {h} x {w}{overlap}: {tokens}"}


def _reading(run: TrainedRun) -> str:
    """How rows are made of inputs."""
    if run.shape.task == "diffusion":
        return (
            "`draw` draws the images of `lightscale draw --sampler ddim` with the same seed, guidance and steps.\n"
            "diffusers' `DDIMScheduler` reads `scheduler/`; call its `step` with `use_clipped_model_output=True`."
        )
    if run.shape.image is not None:
        return (
            "The image processor scales an image to the size of training (bicubic), and its values as in training.\n"
            "`interpolate_pos_encoding=True` takes images of other sizes."
        )
    return f"""Documents start with the end-of-text token; the tokenizer adds it before every text
(`add_special_tokens=False`: not). {_spelled(run)} Each row is one document;
padding can be on either side."""


def _spelled(run: TrainedRun) -> str:
    """What a special token in a text is read as."""
    if run.shape.task == "masked":
        return "`[MASK]` in a text is the mask; other special tokens spelled in a text are also read as such."
    if run.reads_markup:
        return "Special tokens spelled in a text are read as such, as the chat template spells them."
    return "Special tokens spelled in a text are read as ordinary text."


def _task(run: TrainedRun) -> str:
    shape = run.shape
    if shape.task == "masked":
        return "masked: tokens hidden by the mask, whose id follows the tokenizer's last id"
    if shape.num_labels:
        names = f": {', '.join(run.classes[:8])}{', …' * (len(run.classes) > 8)}" if run.classes else ""
        return f"{shape.task}: {shape.num_labels} classes{names}"
    return "causal: the next token"


def _about(config: RunConfig) -> str:
    if not task_class(config.task.name).writes_text:
        return ""
    if softmax := {*config.model.layers} & {*SOFTMAX_MIXERS}:
        kind = "Its layers" if {*config.model.layers} == softmax else "Some of its layers"
        return f"{kind} use softmax attention, so the memory of generation grows with the text."
    return "Its layers mix tokens linearly: generation takes constant memory and time per token."


def _measured(run: RunDirectory, step: int) -> dict[str, str]:
    """Losses and accuracies at the step, or the newest before it, from the run's records."""
    newest: dict[str, tuple[int, float]] = {}
    for record in read_records(run.metrics).lines:
        if record["step"] <= step:
            validation = record.get("validation", {})
            losses = {f"validation loss, {name}": one["loss"] for name, one in validation.items()}
            losses |= {f"accuracy, {name}": one["accuracy"] for name, one in validation.items() if "accuracy" in one}
            if "loss" in record:
                losses["training loss"] = record["loss"]
            newest |= {name: (record["step"], loss) for name, loss in losses.items() if math.isfinite(loss)}
    return {name: f"{loss:.4f} (step {at})" for name, (at, loss) in newest.items()}


def _manifest_hash(run: TrainedRun) -> str:
    facts = json.dumps({name: record.xxh3_128 for name, record in run.manifest.files.items()}, sort_keys=True)
    return xxhash.xxh3_128(facts.encode()).hexdigest()
