"""Files of images to a token store: pixels or latents, labels, names of classes, a split.

Without a path of validation images, a share of all images is held out by the hash of their pixels: equal images are on
the same side, and the side of an image does not depend on the others. The store is a function of the files and the
settings, whatever the number of threads.

With ``as_tokens`` an image is a sequence of tokens, its grey values row by row, as in Long Range Arena (arXiv
2011.04006, section 2.4): a document as of texts, with a label.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from lightscale.data_pipeline.images.broken import BROKEN, Broken
from lightscale.data_pipeline.images.files import KINDS, Fields, FoundImage, ImageFiles, find_files
from lightscale.data_pipeline.images.latents import LATENT_KINDS, LatentForm, Moments
from lightscale.data_pipeline.preparation.labels import check_number, in_order
from lightscale.data_pipeline.preparation.readers.inputs import Problems
from lightscale.data_pipeline.preparation.report import entropies
from lightscale.data_pipeline.preparation.units import split_of
from lightscale.data_pipeline.store.format import IMAGE, LABEL, VALIDATION_SUFFIX, Split, TokenizerIdentity
from lightscale.data_pipeline.store.token_store import SourceWriter, StoreWriter
from lightscale.data_pipeline.tokenizers import NoText, Tokenizer
from lightscale.data_pipeline.tokenizers.symbols import FIRST_SYMBOL, shade_tokenizer
from lightscale.errors import UserError

Values = NDArray[Any]
"""(height, width, channels): pixels, or latents."""
MOST_IMAGE_BYTES = 2**20
"""Of an image: a value of a store's array."""
_AT_ONCE = 256
_CHUNK_BYTES, _SHARD_BYTES = 2**20, 2**29
# The shares of a store's lengths that arrays of documents have.
_TOKENS_PER_DOCUMENT = 16
Progress = Callable[[str, int, int], None]
_STEP = "decode images"


class StoredForm(Protocol):
    """The form of all images of a store, and the way to it."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels)"""

    @property
    def dtype(self) -> str:
        """Number format of the store's array."""

    def decoded(self, data: bytes | Values, where: str) -> Values | Broken:
        """An image of this form; ``UserError`` that begins with ``where`` for another one."""

    def report(self) -> dict[str, Any]:
        """For the store's report."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """What is made of the files."""

    form: StoredForm
    fields: Fields = field(default_factory=Fields)
    """Of parquet files and JSON."""
    name: str = "images"
    """Of the training source; that of the validation images is NAME-validation."""
    validation: float = 0.0
    """Share of the images that is held out."""
    strict: bool = False
    """Whether the first broken image is an error; otherwise broken images are counted and skipped."""
    workers: int = 1
    """Threads that decode."""
    as_tokens: bool = False
    """Whether a pixel is a token; otherwise pixels are an array of the store."""

    def __post_init__(self) -> None:
        if self.as_tokens and self.form.shape[2] != 1:
            height, width, channels = self.form.shape
            raise UserError(
                f"--pixels: a token is a grey value, and --images {height}x{width}x{channels} has {channels} channels; "
                f"use {height}x{width}x1, with --convert-modes for images in colours"
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the store."""
        return shade_tokenizer("pixels") if self.as_tokens else NoText()

    @property
    def sources(self) -> dict[Split, str]:
        """Names of the sources."""
        return {"train": self.name, "validation": self.name + VALIDATION_SUFFIX}


def prepare_images(
    paths: Sequence[Path],
    out: Path,
    settings: ImageSettings,
    *,
    validation_paths: Sequence[Path] = (),
    progress: Progress = lambda step, done, total: None,
) -> dict[str, Any]:
    """Write the store ``out``, and return its report.

    Args:
        paths: files and directories; see ``files.py``.
        out: must not exist.
        settings: form of the images, names, split.
        validation_paths: of the validation images; none: ``settings.validation`` holds out a share of the others.
        progress: of the images.

    Raises:
        UserError: names the file and the fault; nothing is left at ``out``.
    """
    form = settings.form
    is_latent = isinstance(form, LatentForm)
    num_bytes = math.prod(form.shape) * np.dtype(form.dtype).itemsize
    if num_bytes > MOST_IMAGE_BYTES:
        option = "latents" if is_latent else "images"
        raise UserError(f"--{option}: {num_bytes:,} bytes per image; use at most {MOST_IMAGE_BYTES:,}")
    kinds = LATENT_KINDS if is_latent else KINDS
    held = find_files(validation_paths, settings.fields, kinds)
    held_paths = [path for files in held for path in files.paths]
    inputs: dict[Split, list[ImageFiles]] = {"train": find_files(paths, settings.fields, kinds, without=held_paths)}
    if held:
        inputs["validation"] = held
    classes, total = _classes(itertools.chain.from_iterable(inputs.values()))
    problems = Problems(strict=settings.strict)
    tokenizer = settings.tokenizer
    arrays: dict[str, Any] = {LABEL: "int32"}
    layout: dict[str, Any] = {}
    if not settings.as_tokens:
        arrays[IMAGE] = (form.dtype, (math.prod(form.shape),))
        layout = {"image_shape": form.shape, **image_lengths(num_bytes)}
    with StoreWriter(out, tokenizer, classes={LABEL: classes}, **layout) as writer:
        sources = {split: writer.source(name, split, documents=arrays) for split, name in settings.sources.items()}
        written: dict[Split, Counter[str]] = {split: Counter() for split in sources}
        numbers = {name: number for number, name in enumerate(classes)}
        counts = {split: np.zeros(tokenizer.vocab_size, np.int64) for split in sources}
        done, moments = 0, Moments(form.shape[2])
        for split, image, pixels in _split(inputs, settings):
            done += 1
            if isinstance(pixels, Broken):
                problems.add(BROKEN, f"{image.id}: {pixels.reason}")
            else:
                values: dict[str, ArrayLike] = {LABEL: numbers[image.label]}
                ids = np.zeros(0, np.uint32)
                if settings.as_tokens:
                    ids = pixels.reshape(-1).astype(np.uint32) + FIRST_SYMBOL
                    counts[split] += np.bincount(ids, minlength=tokenizer.vocab_size)
                    counts[split][tokenizer.eot_id] += 1
                else:
                    values[IMAGE] = pixels.reshape(-1)
                sources[split].append(ids, num_bytes=num_bytes, documents=values)
                written[split][image.label] += 1
                if is_latent and split == "train":
                    moments.add(pixels)
            if done % _AT_ONCE == 0:
                # It flushes by tokens, of which an image may have one.
                for source in sources.values():
                    source.flush()
                progress(_STEP, done, total)
        if not written["train"]:
            raise UserError(f"{', '.join(map(str, paths))}: no training image is left; {_why(problems, done)}")
        progress(_STEP, total, total)
        report = {
            "tokenizer": asdict(TokenizerIdentity.of(tokenizer)),
            "images": {**form.report(), "read": done, **(moments.report() if is_latent else {})},
            "sources": {
                settings.sources[split]: _source(source, written[split], classes)
                for split, source in sources.items()
                if written[split]
            },
            "unigram_entropy_nats": entropies(counts) if settings.as_tokens else {"train": 0.0},
            "weights": None,
            "problems": problems.as_json(),
        }
        writer.finish(report)
    return report


def _classes(inputs: Iterable[ImageFiles]) -> tuple[list[str], int]:
    """The names of all classes in order, and the number of images."""
    # Before anything is written: what is not a class is found here.
    counts: Counter[str] = Counter()
    for files in inputs:
        for label in files.labels():
            counts[label] += 1
            check_number(counts, str(files.root))
    return in_order(counts), counts.total()


def _split(
    inputs: Mapping[Split, Sequence[ImageFiles]], settings: ImageSettings
) -> Iterator[tuple[Split, FoundImage, Values | Broken]]:
    """All images with their splits."""
    share = 0.0 if "validation" in inputs else settings.validation
    for given, many in inputs.items():
        for files in many:
            for image, pixels in _decoded(files.images(), settings):
                if share and not isinstance(pixels, Broken):
                    yield split_of(xxhash.xxh3_128_hexdigest(pixels.tobytes()), share), image, pixels
                else:
                    yield given, image, pixels


def _decoded(images: Iterable[FoundImage], settings: ImageSettings) -> Iterator[tuple[FoundImage, Values | Broken]]:
    """The pixels of each of ``images``, in order."""
    # Pillow decodes without Python's lock: threads are enough.
    with ThreadPoolExecutor(settings.workers) as pool:
        remaining = iter(images)
        while some := list(itertools.islice(remaining, _AT_ONCE)):
            yield from zip(some, pool.map(lambda one: settings.form.decoded(one.data, one.id), some), strict=True)


def image_lengths(num_bytes: int) -> dict[str, int]:
    """Lengths of a store's arrays by which zarr chunks of images have about a MiB, and shards half a GiB."""
    per_chunk = max(1, _CHUNK_BYTES // num_bytes)
    chunk_tokens = per_chunk * _TOKENS_PER_DOCUMENT
    return {
        "chunk_tokens": chunk_tokens,
        "shard_tokens": chunk_tokens * max(1, _SHARD_BYTES // (per_chunk * num_bytes)),
    }


def _source(source: SourceWriter, found: Counter[str], classes: Sequence[str]) -> dict[str, Any]:
    return {
        "documents": source.num_documents,
        "bytes": source.num_bytes,
        "tokens": source.num_tokens,
        "bytes_per_token": source.num_bytes / source.num_tokens,
        "classes": {name: found[name] for name in classes},
    }


def _why(problems: Problems, done: int) -> str:
    broken = problems.counts[BROKEN]
    if broken < done:
        return "the validation share holds out all; use a smaller one, or more images"
    return f"all {done:,} are broken, such as {problems.examples[BROKEN][0]}" if done else "the files hold no images"
