"""What tasks keep of tokens and documents: a loss mask, arrays of documents; and where documents came from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from lightscale.data_pipeline.store.origins import Origin
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.errors import UserError

EOT = 256


def write_copies(path: Path, tokenizer: TiktokenTokenizer, *, count: int = 30) -> list[dict[str, Any]]:
    """A copying task: the loss is of the second half. (ids, mask, label, target) of every document."""
    generator = np.random.default_rng(0)
    documents = []
    for number in range(count):
        half = generator.integers(0, 256, generator.integers(0, 20), dtype=np.uint32)
        mask = np.repeat([0, 1], len(half))
        target = generator.standard_normal(3).astype(np.float32)
        documents.append({"ids": np.tile(half, 2), "mask": mask, "label": -number, "target": target})
    with StoreWriter(path, tokenizer, shard_tokens=64, chunk_tokens=16) as writer:
        source = writer.source("copy", has_loss_mask=True, documents={"label": "int32", "target": ("float32", (3,))})
        for one in documents:
            values = {"label": one["label"], "target": one["target"]}
            source.append(one["ids"], num_bytes=0, loss_mask=one["mask"], documents=values)
        writer.source("text").append(np.arange(100, dtype=np.uint32), num_bytes=100)
        writer.finish({})
    return documents


def test_masks_and_arrays_come_back_and_plain_zarr_reads_them(
    tmp_path: Path, byte_tokenizer: TiktokenTokenizer
) -> None:
    documents = write_copies(tmp_path / "store", byte_tokenizer)
    store = TokenStore(tmp_path / "store")
    source = store.source("copy")
    expected, end_counts = [], 1
    for one in documents:
        # The end of the text before counts where its last token does.
        expected += [end_counts, *one["mask"].tolist()]
        end_counts = int(one["mask"][-1]) if len(one["mask"]) else end_counts
    assert source.loss_mask(0, source.num_tokens).tolist() == expected
    assert source.loss_mask(70, 75).tolist() == expected[70:75]
    labels, targets = (source.document_values(name, 0, len(documents)) for name in ("label", "target"))
    assert labels.tolist() == [one["label"] for one in documents]
    assert np.array_equal(targets, np.stack([one["target"] for one in documents]))
    assert np.array_equal(source.document_values("target", 7, 9), targets[7:9])
    assert source.document_arrays == {"label": np.dtype("<i4"), "target": np.dtype(("<f4", (3,)))}
    root = zarr.open_group(store.path, mode="r")
    for name, values in (("loss_mask", expected), ("documents.label", labels), ("documents.target", targets)):
        array = root[f"copy/{name}"]
        assert isinstance(array, zarr.Array)
        assert np.array_equal(array[:], values)  # type: ignore[arg-type]
    text = store.source("text")
    assert (text.has_loss_mask, text.document_arrays, text.origin(0)) == (False, {}, None)
    assert text.loss_mask(3, 9).tolist() == [1] * 6
    with pytest.raises(UserError, match="source text: no document array 'label'; it has none"):
        text.document_values("label", 0, 1)


def test_a_mask_is_part_of_what_a_store_is(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> None:
    fingerprints = set()
    for number, mask in enumerate(([0, 1, 1], [1, 1, 1], [0, 1, 0], None)):
        with StoreWriter(tmp_path / str(number), byte_tokenizer, shard_tokens=64, chunk_tokens=16) as writer:
            source = writer.source("a", has_loss_mask=mask is not None)
            source.append(np.array([1, 2, 3], dtype=np.uint32), num_bytes=3, loss_mask=mask)
            writer.finish({})
        fingerprints.add(TokenStore(tmp_path / str(number)).fingerprint())
    assert len(fingerprints) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_mask": [1, 0]}, "loss_mask of shape .2,.: must be 3 values of 0 and 1"),
        ({"loss_mask": [1, 0, 2]}, "must be 3 values of 0 and 1"),
        ({"documents": {}}, r"documents \[\]: the source has \['label', 'target'\]"),
        ({"documents": {"label": 1, "target": [1.0] * 3, "more": 1}}, "the source has"),
        ({"documents": {"label": [1], "target": [1.0] * 3}}, r"label = \[1\]: must be int32 of shape \(\)"),
        ({"documents": {"label": 1.5, "target": [1.0] * 3}}, "label = 1.5: must be int32"),
        ({"documents": {"label": 1, "target": [1.0] * 2}}, r"target = .* must be float32 of shape \(3,\)"),
    ],
)
def test_values_that_a_source_does_not_take(
    tmp_path: Path, byte_tokenizer: TiktokenTokenizer, arguments: dict[str, Any], message: str
) -> None:
    with StoreWriter(tmp_path / "store", byte_tokenizer) as writer:
        source = writer.source("a", has_loss_mask=True, documents={"label": "int32", "target": ("float32", (3,))})
        with pytest.raises(ValueError, match=message):
            source.append(
                np.arange(3, dtype=np.uint32),
                num_bytes=3,
                **{"documents": {"label": 1, "target": [1.0] * 3}, **arguments},
            )
        with pytest.raises(ValueError, match="document array"):
            writer.source("b", documents={"label": "complex64"})
        with pytest.raises(ValueError, match="document array 'a/b'"):
            writer.source("c", documents={"a/b": "int32"})
        plain = writer.source("d")
        with pytest.raises(ValueError, match="has_loss_mask"):
            plain.append(np.arange(3, dtype=np.uint32), num_bytes=3, loss_mask=[1, 1, 1])


def test_the_place_of_an_origin() -> None:
    line = Origin(file="a.jsonl", first_byte=5, num_bytes=10, row=None, id="x")
    assert line.place == "bytes 5 to 15"
    assert Origin(file="a.parquet", first_byte=None, num_bytes=None, row=7, id=None).place == "row 7"
