"""From a generator to a token store: the same bytes for the same generator, seed and number of documents."""

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightscale.data_pipeline.executors import Progress
from lightscale.data_pipeline.generators.interface import Generator, MadeDocument
from lightscale.data_pipeline.images.prepare import image_lengths
from lightscale.data_pipeline.preparation.report import entropies
from lightscale.data_pipeline.store.format import IMAGE, LABEL, SPLITS, VALIDATION_SUFFIX, Split, TokenizerIdentity
from lightscale.data_pipeline.store.token_store import SourceWriter, StoreWriter
from lightscale.data_pipeline.tokenizers import NoText, Tokenizer
from lightscale.errors import UserError

_STEP = "make documents"
_DOCUMENTS_AT_ONCE = 64


def write_made_store(
    out: Path,
    name: str,
    generator: Generator,
    *,
    documents: int,
    validation: int,
    seed: int,
    as_images: bool = False,
    progress: Progress = lambda step, done, total: None,
) -> dict[str, Any]:
    """Write the store ``out`` with the sources NAME and NAME-validation, and return its report.

    Args:
        out: must not exist.
        name: of the generator.
        generator: makes the documents.
        documents, validation: number of documents of each source; ``validation`` may be 0.
        seed: of all of them. More documents are the same ones and further ones.
        as_images: write a store of images, as ``data prepare --images`` does, of documents that are images.
        progress: of the documents.

    Raises:
        UserError: a path that exists, numbers out of range, or options that the generator refuses.
    """
    for what, value, least in (("documents", documents, 1), ("validation", validation, 0)):
        if value < least:
            raise UserError(f"--{what} {value}: must be at least {least}")
    shape = generator.image_shape if as_images else None
    tokenizer: Tokenizer = generator.tokenizer() if shape is None else NoText()
    counts: dict[Split, NDArray[np.int64]] = {split: np.zeros(tokenizer.vocab_size, np.int64) for split in SPLITS}
    sources = {}
    classes = {LABEL: generator.classes} if generator.classes else None
    arrays: dict[str, Any] = {LABEL: "int32"} if generator.classes else {}
    layout: dict[str, Any] = {}
    if shape is not None:
        arrays[IMAGE] = ("uint8", (math.prod(shape),))
        layout = {"image_shape": shape, **image_lengths(math.prod(shape))}
    done, total = 0, documents + validation
    with StoreWriter(out, tokenizer, classes=classes, **layout) as writer:
        for split, count in zip(SPLITS, (documents, validation), strict=True):
            of_split = name if split == "train" else name + VALIDATION_SUFFIX
            source = writer.source(of_split, split, has_loss_mask=generator.has_loss_mask, documents=arrays)
            labels: Counter[int] = Counter()
            for first in range(0, count, _DOCUMENTS_AT_ONCE):
                numbers = range(first, min(first + _DOCUMENTS_AT_ONCE, count))
                made = [generator.document(seed, split, number) for number in numbers]
                labels.update(one.label for one in made if one.label is not None)
                if shape is None:
                    _append(source, made, tokenizer, counts[split])
                else:
                    _append_images(source, made)
                done += len(made)
                progress(_STEP, done, total)
            if count:
                sources[of_split] = _source_report(source, labels, generator)
        report = {
            "tokenizer": asdict(TokenizerIdentity.of(tokenizer)),
            **(
                {}
                if shape is None
                else {"images": {"shape": list(shape), "read": total, "resize": None, "convert": False}}
            ),
            "sources": sources,
            "unigram_entropy_nats": entropies(counts) if shape is None else {"train": 0.0},
            "generator": {"name": name, "seed": seed, **generator.settings()},
            "weights": None,
            "problems": {},
        }
        writer.finish(report)
    return report


def _append(
    source: SourceWriter,
    made: list[MadeDocument],
    tokenizer: Tokenizer,
    counts: NDArray[np.int64],
) -> None:
    """Write ``made``, and add how often each token is in it to (vocab_size,) ``counts``."""
    for one, ids in zip(made, tokenizer.encode_batch([one.text for one in made]), strict=True):
        counts += np.bincount(ids, minlength=len(counts))
        counts[tokenizer.eot_id] += 1
        source.append(
            ids,
            num_bytes=len(one.text.encode()),
            loss_mask=one.counts,
            documents=None if one.label is None else {LABEL: one.label},
        )


def _append_images(source: SourceWriter, made: list[MadeDocument]) -> None:
    """Write the pixels of ``made``, each a document of no token but the end of text."""
    for one in made:
        assert one.pixels is not None and one.label is not None, "images with classes"
        values: dict[str, ArrayLike] = {IMAGE: one.pixels.reshape(-1), LABEL: one.label}
        source.append(np.zeros(0, np.uint32), num_bytes=one.pixels.nbytes, documents=values)
    # It flushes by tokens, of which an image has one.
    source.flush()


def _source_report(source: SourceWriter, labels: Counter[int], generator: Generator) -> dict[str, Any]:
    return {
        "documents": source.num_documents,
        "bytes": source.num_bytes,
        "tokens": source.num_tokens,
        "bytes_per_token": source.num_bytes / source.num_tokens,
        **({"classes": {one: labels[number] for number, one in enumerate(generator.classes)}} if labels else {}),
    }
