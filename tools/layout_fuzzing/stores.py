"""Small made-up stores.

Text of two sources, one with a loss mask; documents with labels; pairs of documents with labels; questions with
answers; pairs of answers; texts of one length, with labels and a loss mask, as grids; images of random pixels.
"""

import itertools
import json
import random
import string
from pathlib import Path

import numpy as np

from layout_fuzzing.options import IMAGE_GRIDS, NUMBERS, TOKENS
from lightscale.data_pipeline.store.token_store import StoreWriter
from lightscale.data_pipeline.tokenizers.ascii_characters import AsciiTokenizer
from lightscale.data_pipeline.tokenizers.no_text import NoText

_LABELS = 3


def write_stores(folder: Path) -> None:
    """The stores of these names in ``folder``: ``text``, ``labelled``, ``matches``, ``answers``, ``pairs``,
    ``grids-TOKENS``, ``images-HEIGHTxWIDTHxCHANNELS``.
    """
    rng, tokenizer = random.Random(0), AsciiTokenizer()
    with StoreWriter(folder / "text", tokenizer) as writer:
        for name, masked in (("plain", False), ("masked", True)):
            source = writer.source(name, "train", has_loss_mask=masked)
            for _ in range(150):
                ids = tokenizer.encode("".join(rng.choices(string.printable, k=rng.choice((0, 1, 5, 30, 90)))))
                mask = np.array([rng.random() < 0.7 for _ in ids], dtype=np.uint8) if masked else None
                source.append(ids, num_bytes=len(ids), loss_mask=mask)
        writer.finish({})
    for tokens in (TOKENS // 2, TOKENS):
        _write_grids(folder, tokens)
    for grid, size, channels in itertools.product(IMAGE_GRIDS, NUMBERS["model.patches.size"], (1, 3)):
        height, width = (number * extent for number, extent in zip(grid["shape"], size, strict=True))
        _write_images(folder, (height, width, channels))
    with StoreWriter(folder / "answers", tokenizer) as writer:
        source = writer.source("sums", "train", has_loss_mask=True)
        for _ in range(200):
            # Whole in a sequence, so that each has tokens that count.
            asked, answer = ("".join(rng.choices(string.digits, k=rng.randint(1, most))) for most in (30, 15))
            mask = np.repeat([0, 1], [len(asked), len(answer)])
            source.append(tokenizer.encode(asked + answer), num_bytes=len(mask), loss_mask=mask)
        writer.finish({})
    _write_pairs(folder, tokenizer, rng)
    _write_matches(folder, tokenizer, random.Random(1))
    with StoreWriter(folder / "labelled", tokenizer) as writer:
        source = writer.source("words", "train", documents={"label": "int32"})
        for _ in range(300):
            label = rng.randrange(_LABELS)
            text = "".join(rng.choices(("abc", "def", "ghi")[label], k=rng.randint(1, 40)))
            source.append(tokenizer.encode(text), num_bytes=len(text), documents={"label": label})
        writer.finish({})


def _write_matches(folder: Path, tokenizer: AsciiTokenizer, rng: random.Random) -> None:
    """Pairs of documents, with their ends of at most 24 tokens, which the sequences of a drawn curriculum hold."""
    with StoreWriter(folder / "matches", tokenizer) as writer:
        source = writer.source("words", "train", pairs=True, documents={"label": "int32"})
        for _ in range(150):
            label = rng.randrange(_LABELS)
            for letters in ("abc", ("abc", "def", "ghi")[label]):
                text = "".join(rng.choices(letters, k=rng.randint(1, 11)))
                source.append(tokenizer.encode(text), num_bytes=len(text), documents={"label": label})
        writer.finish({})


def _write_pairs(folder: Path, tokenizer: AsciiTokenizer, rng: random.Random) -> None:
    """Both answers to a prompt, and what `data prepare` notes of such a source."""
    with StoreWriter(folder / "pairs", tokenizer) as writer:
        source = writer.source("answers", "train", has_loss_mask=True)
        # With their ends a pair has at most 24 tokens, which the sequences of a drawn curriculum hold.
        for _ in range(150):
            prompt = rng.choices(string.digits, k=rng.randint(1, 5))
            for answer in (rng.choices(string.ascii_letters, k=rng.randint(1, 6)) for _ in range(2)):
                mask = np.repeat([0, 1], [len(prompt), len(answer)])
                source.append(tokenizer.encode("".join(prompt + answer)), num_bytes=len(mask), loss_mask=mask)
        writer.finish({})
    metadata = folder / "pairs" / "answers" / "zarr.json"
    group = json.loads(metadata.read_text("utf-8"))
    group["attributes"]["chat"] = {"pairs": True}
    metadata.write_text(json.dumps(group), encoding="utf-8")


def _write_grids(folder: Path, tokens: int) -> None:
    rng, tokenizer = random.Random(tokens), AsciiTokenizer()
    with StoreWriter(folder / f"grids-{tokens}", tokenizer) as writer:
        source = writer.source("slices", "train", has_loss_mask=True, documents={"label": "int32"})
        for _ in range(200):
            # The store writes the end-of-text token before it.
            ids = tokenizer.encode("".join(rng.choices(string.ascii_letters + " ", k=tokens - 1)))
            mask = np.array([rng.random() < 0.7 for _ in ids], dtype=np.uint8)
            source.append(ids, num_bytes=len(ids), loss_mask=mask, documents={"label": rng.randrange(_LABELS)})
        writer.finish({})


def _write_images(folder: Path, shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(shape)
    with StoreWriter(folder / f"images-{'x'.join(map(str, shape))}", NoText(), image_shape=shape) as writer:
        pixels = int(np.prod(shape))
        source = writer.source("photos", "train", documents={"image": ("uint8", (pixels,)), "label": "int32"})
        for _ in range(40):
            image = rng.integers(0, 256, pixels, dtype=np.uint8)
            source.append([], num_bytes=pixels, documents={"image": image, "label": int(rng.integers(_LABELS))})
        writer.finish({})
