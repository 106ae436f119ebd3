"""Small made-up stores: text of two sources, one with a loss mask, and documents with labels."""

import random
import string
from pathlib import Path

import numpy as np

from lightscale.data_pipeline.store.token_store import StoreWriter
from lightscale.data_pipeline.tokenizers.ascii_characters import AsciiTokenizer

_LABELS = 3


def write_stores(folder: Path) -> None:
    """``text`` and ``labelled`` in ``folder``; documents of 0 to 90 characters."""
    rng, tokenizer = random.Random(0), AsciiTokenizer()
    with StoreWriter(folder / "text", tokenizer) as writer:
        for name, masked in (("plain", False), ("masked", True)):
            source = writer.source(name, "train", has_loss_mask=masked)
            for _ in range(150):
                ids = tokenizer.encode("".join(rng.choices(string.printable, k=rng.choice((0, 1, 5, 30, 90)))))
                mask = np.array([rng.random() < 0.7 for _ in ids], dtype=np.uint8) if masked else None
                source.append(ids, num_bytes=len(ids), loss_mask=mask)
        writer.finish({})
    with StoreWriter(folder / "labelled", tokenizer) as writer:
        source = writer.source("words", "train", documents={"label": "int32"})
        for _ in range(300):
            label = rng.randrange(_LABELS)
            text = "".join(rng.choices(("abc", "def", "ghi")[label], k=rng.randint(1, 40)))
            source.append(tokenizer.encode(text), num_bytes=len(text), documents={"label": label})
        writer.finish({})
