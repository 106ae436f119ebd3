"""``lightscale data prepare --images`` and ``--latents``: files of images to a token store."""

import argparse
import re
import time
from pathlib import Path

from lightscale.config.arguments import path_argument
from lightscale.data_pipeline.commands.corpus import DEFAULT_VALIDATION, is_corpus_file, source_name
from lightscale.data_pipeline.commands.printed_report import show_store
from lightscale.data_pipeline.images.files import Fields
from lightscale.data_pipeline.images.latents import LatentForm
from lightscale.data_pipeline.images.prepare import ImageSettings, StoredForm, prepare_images
from lightscale.errors import UserError
from lightscale.output.progress import progress_bars

_SHAPE = re.compile(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})x([1-9][0-9]{0,2})")
_OF_PIXELS = ("resize", "convert_modes", "image_field", "pixels")
_OF_IMAGES = (*_OF_PIXELS, "validation_images", "latents_dtype")
# Of texts alone, with the values that leave them out.
_OF_TEXTS = (
    *("corpus", "tokenizer", "vocab_size", "suffixes", "text_field", "text_pair_field", "max_tokens", "language"),
    *("executor", "restart", "keep_removed"),
)


def add_images(parser: argparse.ArgumentParser) -> None:
    """Declare the options of images."""
    add = parser.add_argument_group(
        "for images (with --images; PATHs are folders, .tar, .parquet, .npz and CIFAR-10's .bin files; with --latents "
        "folders, .tar and .npz)"
    ).add_argument
    shape = "prepare images of this shape in pixels and channels (1: grey, 3: RGB), such as 224x224x3"
    add("--images", metavar="HEIGHTxWIDTHxCHANNELS", help=shape)
    resize = "change images of another size: crop covers the shape and cuts the centre, stretch scales both axes"
    add("--resize", choices=["crop", "stretch"], help=f"{resize} (default: refuse them)")
    convert = "convert other modes (palettes, alpha, grey or RGB) to the channels of --images (default: refuse them)"
    add("--convert-modes", action="store_true", help=convert)
    pixels = "make each grey pixel a token, row by row, for models of sequences (default: pixels for models of images)"
    add("--pixels", action="store_true", help=pixels)
    held = "file or directory of the validation images, in place of a share; repeatable"
    add("--validation-images", type=path_argument, action="append", metavar="PATH", help=held)
    latents = "prepare latents, floats of this shape in .npy, .tar and .npz files, such as 32x32x4"
    add("--latents", metavar="HEIGHTxWIDTHxCHANNELS", help=latents)
    dtype = "number format of the latents, in files and store (default: float16)"
    add("--latents-dtype", choices=["float16", "float32"], help=dtype)
    add("--image-field", help="column of the images in parquet files (default: image)")


def check_no_images(args: argparse.Namespace) -> None:
    """``UserError`` for options of images without --images."""
    if given := [name for name in _OF_IMAGES if getattr(args, name)]:
        option = "latents" if given[0] == "latents_dtype" else "images"
        raise UserError(f"--{given[0].replace('_', '-')}: it belongs to images; add --{option} HEIGHTxWIDTHxCHANNELS")


def prepare_images_command(args: argparse.Namespace) -> int:
    """Prepare images or latents; 0 when it is done, ``UserError`` for a user's mistake."""
    _check(args)
    settings = ImageSettings(
        form=_latent_form(args) if args.latents else _image_form(args),
        fields=Fields(image=args.image_field or "image", label=args.label_field or "label"),
        name=args.name or source_name(args),
        validation=_validation(args),
        strict=args.strict,
        workers=1 if args.workers is None else args.workers,
        as_tokens=args.pixels,
    )
    started = time.monotonic()
    with progress_bars(counts="images") as progress:
        report = prepare_images(
            args.paths, args.out, settings, validation_paths=args.validation_images or (), progress=progress
        )
    seconds = time.monotonic() - started
    if (console := show_store(args, report, seconds)) is not None:
        rate = report["images"]["read"] / max(seconds, 1e-9)
        console.print(f"wrote {args.out} in {seconds:.1f} s ({rate:,.0f} images per second)")
    return 0


def _latent_form(args: argparse.Namespace) -> StoredForm:
    if args.images:
        raise UserError("--images and --latents: a store has one of them; remove the other")
    if given := [name for name in _OF_PIXELS if getattr(args, name)]:
        raise UserError(f"--{given[0].replace('_', '-')}: it is for pixels, and --latents are floats; remove it")
    return LatentForm(shape=_shape("latents", args.latents), dtype=args.latents_dtype or "float16")


def _image_form(args: argparse.Namespace) -> StoredForm:
    if args.latents_dtype:
        raise UserError(f"--latents-dtype {args.latents_dtype}: it belongs to --latents; remove it")
    # Late: Pillow is optional.
    try:
        from lightscale.data_pipeline.images.decode import ImageForm  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "PIL":
            raise
        raise UserError("--images: images need the package pillow; pip install 'lightscale[images]'") from None
    return ImageForm(shape=_shape("images", args.images), resize=args.resize, convert=args.convert_modes)


def _check(args: argparse.Namespace) -> None:
    if is_corpus_file(args) or not args.paths:
        raise UserError("--images, --latents: give PATHs of their files; corpus files describe texts")
    if remote := [path for path in args.paths if not isinstance(path, Path)]:
        raise UserError(f"{remote[0].name}: images are read from this machine; download the files first")
    if given := [name for name in _OF_TEXTS if getattr(args, name)]:
        raise UserError(f"--images and --{given[0].replace('_', '-')}: the latter is for texts; remove it")
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: use at least 1")


def _shape(option: str, given: str) -> tuple[int, int, int]:
    found = _SHAPE.fullmatch(given)
    if found is None:
        raise UserError(f"--{option} {given}: must be HEIGHTxWIDTHxCHANNELS, such as 224x224x3")
    height, width, channels = map(int, found.groups())
    return height, width, channels


def _validation(args: argparse.Namespace) -> float:
    """The share that is held out."""
    if args.validation_images and args.validation is not None:
        raise UserError("--validation and --validation-images: use one of them")
    share: float = (
        (0.0 if args.validation_images else DEFAULT_VALIDATION) if args.validation is None else args.validation
    )
    if not 0 <= share < 1:
        raise UserError(f"--validation {share}: must be at least 0 and below 1")
    return share
