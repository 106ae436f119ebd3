"""``lightscale draw``: draw images with a trained diffusion transformer."""

import argparse
import functools
import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import numpy as np

from lightscale.config.arguments import OVERRIDE, path_argument, run_path
from lightscale.data_pipeline.augmentation.noise import scaled
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun, choose_run
from lightscale.evaluation.drawing.request import DrawingRequest, Judge
from lightscale.evaluation.drawing.sampler import Sampler
from lightscale.evaluation.prediction.request import class_names
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
from lightscale.models.specs.patches import patch_numbers
from lightscale.runs.run_directory import split_step
from lightscale.tasks.diffusion import DiffusionTaskConfig

NAME = "draw"
_MOST_COLUMNS = 20
_LEAST_JUDGED = 2
_LARGEST_SEED = 2**64 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale draw``."""
    parser.description = (
        'Draws images of given classes with a run whose task.name = "diffusion", and writes them to one PNG file. With '
        "--classifier, a classifier of the same images measures them."
    )
    add = parser.add_argument
    add("run", metavar="RUN[@STEP]", help="directory of a run, or NAME for runs/NAME; step (default: the newest)")
    layout = "layout of the model over ranks, such as parallel.tensor=2 (default: a complete model on each rank)"
    add("overrides", nargs="*", default=[], metavar=OVERRIDE, help=layout)
    add("--out", type=path_argument, metavar="FILE", help="write the picture of all images to a new PNG file")
    latents = "write latents to a new .npz file, for runs with model.patches.latents = true"
    add("--latents", type=path_argument, metavar="FILE", help=latents)
    add("--folder", type=path_argument, metavar="PATH", help="write each image to a new folder, as CLASS/NUMBER.png")
    add("--count", type=int, default=100, metavar="N", help="number of images (default: %(default)s)")
    add("--class", action="append", dest="classes", metavar="NAME",
        help="class of the images, by name or number; repeatable (default: all classes in turn)")  # fmt: skip
    add("--ema", metavar="NAME", help="the average of that name in optimizer.ema, in place of the weights")
    samplers = "way from noise to image (default: %(default)s)"
    add("--sampler", choices=["ddim", "ddpm"], default="ddim", help=samplers)
    add(
        "--steps", type=int, default=50, metavar="N", help="number of timesteps that are visited (default: %(default)s)"
    )
    guidance = "scale of classifier-free guidance; 1: none (default: %(default)s)"
    add("--guidance", type=float, default=1.0, metavar="SCALE", help=guidance)
    add("--seed", type=int, default=0, metavar="N", help="random seed (default: %(default)s)")
    add("--columns", type=int, metavar="N", help="images per row of the picture (default: one per class, at most 20)")
    add("--scale", type=int, metavar="N", help="width of a pixel in the picture (default: 1)")
    classifier = "run of a classifier that measures the images: share recognised, distances, score, precision, recall"
    add("--classifier", metavar="RUN[@STEP]", help=classifier)
    real = "source of the run's store with real images, for --classifier (default: the first that is trained on)"
    add("--real", metavar="SOURCE", help=real)
    add("--processes", type=int, metavar="N", help="ranks on this machine (default: one per GPU, or one)")
    row = "tokens per forward pass of the model (default: %(default)s)"
    add("--row-tokens", type=int, default=8192, metavar="N", help=row)
    add("--store", type=path_argument, metavar="PATH", help="token store of the run (default: the run's)")
    add("--json", action="store_true", help="with --classifier: print the measures as one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Draw. A rank (started by torchrun, srun or mpirun) joins the others; any other process starts the ranks."""
    return join_or_start(functools.partial(_rank, args), functools.partial(_start, args))


def _asked(args: argparse.Namespace) -> DrawingRequest:
    """What is to be done, found and checked without torch."""
    least = {"count": 1, "steps": 1, "seed": 0, "columns": 1, "scale": 1, "row_tokens": 64}
    for name, number in least.items():
        if (value := getattr(args, name)) is not None and value < number:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {number}")
    if args.seed > _LARGEST_SEED:
        raise UserError(f"--seed {args.seed}: must be at most {_LARGEST_SEED}")
    if not 0 <= args.guidance < float("inf"):
        raise UserError(f"--guidance {args.guidance}: must be a number of at least 0")
    for option in ("out", "latents", "folder"):
        path = getattr(args, option)
        if path is not None and (path.exists() or path.is_symlink()):
            raise UserError(f"--{option} {path}: the path exists; remove it or use another path")
    chosen = _chosen(args.run, args)
    config = chosen.config
    task = config.task
    if not isinstance(task, DiffusionTaskConfig):
        raise UserError(
            f'{chosen.directory.path}: its task.name = "{task.name}", which draws nothing; use a run with task.name = '
            '"diffusion"'
        )
    _check_output(args, chosen)
    if args.ema is not None:
        chosen.require_average(args.ema)
    names = class_names(chosen)
    if args.folder is not None:
        for name in names:
            if not name.isprintable() or name in ("", ".", "..") or "/" in name:
                raise UserError(
                    f"--folder: {chosen.directory.classes}: class {name!r} can be no folder's name; use --out alone"
                )
    classes = _classes(args, chosen, names)
    return DrawingRequest(
        chosen=chosen,
        sampler=_sampler(args, chosen, task),
        classes=[classes[number % len(classes)] for number in range(args.count)],
        class_names=names,
        average=args.ema,
        columns=min(args.columns or min(len(classes), _MOST_COLUMNS), args.count),
        scale=args.scale or 1,
        row_tokens=args.row_tokens,
        out=args.out,
        latents=args.latents,
        folder=args.folder,
        judge=_judge(args, chosen),
        as_json=args.json,
    )


def _check_output(args: argparse.Namespace, chosen: ChosenRun) -> None:
    """UserError unless there is a file for what the run draws, and no option of the other kind."""
    patches, path = chosen.config.model.patches, chosen.directory.path
    assert patches is not None, "checked with the configuration"
    if not patches.latents:
        if args.latents is not None:
            raise UserError(f"--latents {args.latents}: {path} draws pixels; use --out FILE")
        if args.out is None:
            raise UserError("--out is missing: name a new PNG file for the picture of all images")
        if args.out.suffix.lower() != ".png":
            raise UserError(f"--out {args.out}: it becomes a PNG file; use a name that ends in .png")
        if find_spec("PIL") is None:
            raise UserError("--out: PNG files need the package pillow; pip install 'lightscale[images]'")
        return
    for option in ("out", "folder", "columns", "scale", "classifier"):
        if (value := getattr(args, option)) is not None:
            raise UserError(
                f"--{option} {value}: it is for pixels, and {path} draws latents (model.patches.latents = true); "
                "remove it, and use --latents FILE"
            )
    if args.latents is None:
        raise UserError(f"--latents is missing: {path} draws latents; name a new .npz file for them")
    if args.latents.suffix != ".npz":
        raise UserError(f"--latents {args.latents}: it becomes an archive of numpy; use a name that ends in .npz")


def _chosen(run: str, args: argparse.Namespace) -> ChosenRun:
    directory, step = split_step(run)
    # On whatever device there is, as a run of GPUs is looked at on any machine.
    overrides = ["train.device=auto", *overrides_among_one(args.overrides)]
    return choose_run(run_path(directory), step=step, store=args.store, overrides=overrides, any_task=True)


def _sampler(args: argparse.Namespace, chosen: ChosenRun, task: DiffusionTaskConfig) -> Sampler:
    if args.steps > task.timesteps:
        raise UserError(f"--steps {args.steps}: the run has task.timesteps = {task.timesteps}; use at most these")
    untrained = {0.0: "without a class", 1.0: "with one"}.get(task.label_dropout)
    if untrained is not None and args.guidance != 1 - task.label_dropout:
        raise UserError(
            f"--guidance {args.guidance:g}: with task.label_dropout = {task.label_dropout:g} the run learned nothing "
            f"{untrained}; use --guidance {1 - task.label_dropout:g}, or a run with another task.label_dropout"
        )
    patches, diffusion = chosen.config.model.patches, chosen.config.model.diffusion
    assert patches is not None and diffusion is not None, "checked with the configuration"
    ends = np.array([[0], [255]], dtype=np.uint8).repeat(patch_numbers(patches), axis=1)
    low, high = scaled(ends, patches.mean, patches.std)
    if patches.latents:
        # Nothing is cut off.
        low, high = np.full_like(low, -np.inf), np.full_like(high, np.inf)
    return Sampler(
        name=args.sampler,
        schedule=task.schedule,
        timesteps=task.timesteps,
        prediction=task.prediction,
        steps=args.steps,
        guidance=args.guidance,
        no_class=diffusion.num_labels,
        low=low,
        high=high,
        seed=args.seed,
    )


def _classes(args: argparse.Namespace, chosen: ChosenRun, names: list[str]) -> list[int]:
    """The numbers of the classes that are asked for."""
    assert chosen.config.model.diffusion is not None, "checked with the configuration"
    count = chosen.config.model.diffusion.num_labels
    if not args.classes:
        return list(range(count))
    # A name is meant before a number.
    known = {str(number): number for number in range(count)} | {name: number for number, name in enumerate(names)}
    for name in args.classes:
        if name not in known:
            raise UserError(
                f"--class {name}: the run has {count} classes: {', '.join(names[:20]) or f'0 to {count - 1}'}"
            )
    return [known[name] for name in args.classes]


def _judge(args: argparse.Namespace, drawing: ChosenRun) -> Judge | None:
    """The classifier, whose images are those that are drawn."""
    if args.classifier is None:
        if args.real is not None:
            raise UserError(f"--real {args.real} has no effect without --classifier; remove it")
        if args.json:
            raise UserError("--json prints the measures of a classifier; add --classifier RUN, or remove --json")
        return None
    chosen = _chosen(args.classifier, args)
    config, path = chosen.config, chosen.directory.path
    if config.task.name != "classify-image":
        raise UserError(
            f'--classifier {path}: its task.name = "{config.task.name}"; use a run with task.name = "classify-image"'
        )
    if config.model.image_shape != drawing.config.model.image_shape:
        theirs, own = ("x".join(map(str, one.config.model.image_shape or ())) for one in (chosen, drawing))
        raise UserError(f"--classifier {path}: it reads images of {theirs}, and {own} are drawn; use one of these")
    if class_names(chosen) != class_names(drawing):
        raise UserError(f"--classifier {path}: its classes are not those of {drawing.directory.path}; use one of these")
    store = args.store or next(iter(drawing.config.data.store_paths.values()))
    known = TokenStore(store)
    height_width_channels = known.image_shape
    assert config.model.patches is not None, "a model of images"
    if known.has_latents or height_width_channels is None or height_width_channels[2] != config.model.patches.channels:
        raise UserError(
            f"--store {store}: --classifier {path} reads images of {config.model.patches.channels} channels, and these "
            "are others; use the store of the drawn images"
        )
    source = args.real or next(iter(known.training_weights()))
    if source not in known.sources:
        raise UserError(f"--real {source}: {store} has no such source; use one of {', '.join(known.sources)}")
    for option, count in (("--count", args.count), (f"--real {source}:", known.sources[source].num_documents)):
        if count < _LEAST_JUDGED:
            raise UserError(f"{option} {count}: --classifier compares at least {_LEAST_JUDGED} drawn and real images")
    return Judge(chosen=chosen, source=source, store=store)


def _start(args: argparse.Namespace) -> int:
    asked = _asked(args)
    config = asked.chosen.config
    processes = num_processes(config, args.processes)
    _check_ranks(asked, processes)
    print("loading PyTorch and Megatron …", file=sys.stderr, flush=True)
    if processes > 1:
        words = rank_words(args, options={"classes": "--class"})
        return start_ranks(sys.modules[__name__], words, config=config, processes=processes)
    preload().draw(asked)
    return 0


def _check_ranks(asked: DrawingRequest, world_size: int) -> None:
    check_ranks(asked.chosen.config, world_size)
    if asked.judge is not None:
        check_ranks(asked.judge.chosen.config, world_size)


def _rank(args: argparse.Namespace, environment: RankEnvironment) -> int:
    """The work of one rank."""
    join(environment)
    asked = _asked(args)
    _check_ranks(asked, environment.world_size)
    preload().draw(asked)
    return 0


def preload() -> ModuleType:
    """Import models and engine by name: it takes seconds, and mistakes are reported before."""
    return importlib.import_module("lightscale.evaluation.drawing.draw")
