"""``lightscale predict``: predict fillings of masks, classes or vectors of documents with a trained model."""

import argparse
import functools
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from lightscale.config.arguments import OVERRIDE, path_argument, run_path
from lightscale.config.model import ModelConfig, Pooling
from lightscale.config.schema import RunConfig
from lightscale.config.tasks import task_class
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun, choose_run, longest_context
from lightscale.evaluation.prediction.documents import MASK_TEXT, MaskWriting, read_documents
from lightscale.evaluation.prediction.request import Document, Kind, PredictionRequest, class_names
from lightscale.evaluation.resolutions.request import image_grid
from lightscale.launch.commands.checks import num_processes
from lightscale.launch.commands.model_ranks import (
    check_ranks,
    join,
    join_or_start,
    overrides_among_one,
    rank_words,
    start_ranks,
)
from lightscale.launch.environment import RankEnvironment
from lightscale.runs.run_directory import split_step

NAME = "predict"
_TOP = 5
_POOLINGS: dict[str, Pooling] = {"mean": "mean", "last": "last"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale predict``."""
    parser.description = (
        "Reads documents from a file of JSON lines, or image files, and prints one line per document, in order. A run "
        'with task.name = "masked" predicts the most probable fillings of masks, "classify" and "classify-image" '
        "predict classes. With --embed, any run gives a vector per document."
    )
    add = parser.add_argument
    add("run", metavar="RUN[@STEP]", help="directory of a run, or NAME for runs/NAME; step (default: the newest)")
    layout = "layout of the model over ranks, such as parallel.tensor=2 (default: a complete model on each rank)"
    add("overrides", nargs="*", default=[], metavar=OVERRIDE, help=layout)
    lines = 'JSON lines such as {"text": "The [MASK] sat.", "id": 1}; of images: a file, or a folder of files'
    add("--file", type=path_argument, required=True, metavar="FILE", help=lines)
    add("--text-field", default="text", metavar="NAME", help="key of the text in each line (default: %(default)s)")
    second = "with model.head.pairs: key of the second text (default: text_pair)"
    add("--text-pair-field", metavar="NAME", help=second)
    add("--mask", metavar="TEXT", help=f"placeholder of a token to predict (default: {MASK_TEXT})")
    top = f"number of most probable fillings per mask, or of classes (default: {_TOP} fillings, all classes)"
    add("--top", type=int, metavar="K", help=top)
    resize = "change images of another size: crop covers the model's and cuts the centre, stretch scales both axes"
    add("--resize", choices=["crop", "stretch"], help=resize)
    size = "size of the images in pixels, in multiples of a patch (default: as in training)"
    add("--image-size", metavar="HEIGHTxWIDTH", help=size)
    add("--convert-modes", action="store_true", help="convert other modes of images to the model's channels")
    embed = "print a vector per document: the mean of its tokens' last states, or the last token's"
    add("--embed", choices=list(_POOLINGS), help=embed)
    add("--out", type=path_argument, metavar="FILE", help="write JSON lines to a new file")
    add("--json", action="store_true", help="print one line of JSON per document")
    add("--processes", type=int, metavar="N", help="ranks on this machine (default: one per GPU, or one)")
    context = "longest document, in tokens (default: no limit for linear mixers; the longest training sequence for "
    add("--context", type=int, metavar="N", help=f"{context}models with softmax attention)")
    row = "tokens per forward pass of the model (default: %(default)s)"
    add("--row-tokens", type=int, default=8192, metavar="N", help=row)
    add("--store", type=path_argument, metavar="PATH", help="token store with the tokenizer (default: the run's)")


def run(args: argparse.Namespace) -> int:
    """Predict. A rank (started by torchrun, srun or mpirun) joins the others; any other process starts the ranks."""
    return join_or_start(functools.partial(_rank, args), functools.partial(_start, args))


def _asked(args: argparse.Namespace) -> PredictionRequest:
    """What is to be done, found and checked without torch."""
    for name, value, least in (("top", args.top, 1), ("context", args.context, 1), ("row-tokens", args.row_tokens, 64)):
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    if args.mask == "":
        raise UserError(f'--mask "": must not be empty; use {MASK_TEXT}')
    overrides = overrides_among_one(args.overrides)
    if args.out is not None and (args.out.exists() or args.out.is_symlink()):
        raise UserError(f"--out {args.out}: the file exists; remove it or use another path")
    directory, step = split_step(args.run)
    # On whatever device there is, as a run of GPUs is looked at on any machine.
    chosen = choose_run(
        run_path(directory), step=step, store=args.store, overrides=["train.device=auto", *overrides], any_task=True
    )
    kind = _kind(args, chosen)
    ids = chosen.tokenizer.vocab_size
    # The mask is the id behind the tokenizer's last.
    masks = MaskWriting(text=args.mask or MASK_TEXT, id=ids) if kind == "fillings" else None
    head = chosen.config.model.head
    grid = None if args.image_size is None else image_grid("--image-size", args.image_size, chosen.config.model)
    model = chosen.config.model if grid is None else chosen.config.model.on_grid(grid)
    return PredictionRequest(
        chosen=chosen,
        kind=kind,
        documents=_documents(args, chosen, model, masks),
        masks=masks,
        pooling=None if args.embed is None else _POOLINGS[args.embed],
        top=min(args.top or _TOP, ids) if head is None else min(args.top or head.num_labels, head.num_labels),
        class_names=class_names(chosen) if kind == "classes" else [],
        grid=grid,
        row_tokens=args.row_tokens,
        out=args.out,
        as_json=args.json or args.out is not None,
    )


def _documents(
    args: argparse.Namespace, chosen: ChosenRun, model: ModelConfig, masks: MaskWriting | None
) -> Sequence[Document]:
    """What is predicted from: the lines of a file, or images."""
    if model.patches is None:
        return read_documents(
            args.file,
            chosen.tokenizer,
            text_field=args.text_field,
            text_pair_field=(args.text_pair_field or "text_pair") if _reads_pairs(args, chosen) else None,
            masks=masks,
            most_tokens=args.context or longest_context(chosen.config),
        )
    # Late: Pillow is optional.
    try:
        from lightscale.evaluation.prediction.image_files import read_images  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "PIL":
            raise
        raise UserError("--file: images need the package pillow; pip install 'lightscale[images]'") from None
    return read_images(args.file, model, resize=args.resize, convert=args.convert_modes)


def _ranked(asked: PredictionRequest) -> RunConfig:
    """The configuration whose lengths the ranks share out."""
    config = asked.chosen.config
    if asked.grid is None:
        return config
    model = config.model.on_grid(asked.grid)
    assert model.grid is not None, "a model of images"
    data = config.data.model_copy(update={"sequence_length": model.grid.document_tokens})
    return config.model_copy(update={"model": model, "data": data})


def _reads_pairs(args: argparse.Namespace, chosen: ChosenRun) -> bool:
    """Whether two texts are classified together; a vector is of one text."""
    head = chosen.config.model.head
    return head is not None and head.pairs and args.embed is None


def _kind(args: argparse.Namespace, chosen: ChosenRun) -> Kind:
    """What is predicted, by the run's task; UserError for options that say something of another kind."""
    name = chosen.config.task.name
    task, where = task_class(name), f'{chosen.directory.path}: its task.name = "{name}"'
    if task.predicts_noise:
        raise UserError(f"{where}, which predicts noise; use `lightscale draw` to draw images")
    if not task.reads_images:
        for option in ("resize", "convert_modes", "image_size"):
            if getattr(args, option):
                given = f"--{option.replace('_', '-')}"
                raise UserError(f"{given}: {where}, which reads texts; remove {given}")
    if args.embed is not None:
        kind: Kind = "embeddings"
    elif task.writes_text:
        raise UserError(
            f"{where}: use `lightscale generate` to continue texts, or --embed mean for a vector per document"
        )
    else:
        kind = "classes" if task.predicts_labels else "fillings"
    if args.text_pair_field is not None and not _reads_pairs(args, chosen):
        reason = "with --embed one vector per text" if args.embed else "of single documents"
        raise UserError(f"--text-pair-field {args.text_pair_field}: {where}, {reason}; remove --text-pair-field")
    if args.mask is not None and kind != "fillings":
        raise UserError(
            f"--mask {args.mask}: {where}{' and --embed' if args.embed else ''}: no masks to fill; remove --mask"
        )
    if args.top is not None and kind == "embeddings":
        raise UserError(f"--top {args.top}: --embed {args.embed} gives one vector per document; remove --top")
    return kind


def _start(args: argparse.Namespace) -> int:
    asked = _asked(args)
    config = asked.chosen.config
    processes = num_processes(config, args.processes)
    check_ranks(_ranked(asked), processes)
    print("loading PyTorch and Megatron …", file=sys.stderr, flush=True)
    if processes > 1:
        return start_ranks(sys.modules[__name__], rank_words(args), config=config, processes=processes)
    preload().predict(asked)
    return 0


def _rank(args: argparse.Namespace, environment: RankEnvironment) -> int:
    """The work of one rank."""
    join(environment)
    asked = _asked(args)
    check_ranks(_ranked(asked), environment.world_size)
    preload().predict(asked)
    return 0


def preload() -> ModuleType:
    """Import models and engine by name: it takes seconds, and mistakes are reported before."""
    return importlib.import_module("lightscale.evaluation.prediction.predict")
