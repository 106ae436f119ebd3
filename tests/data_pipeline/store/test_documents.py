"""What tasks keep of tokens and documents: a loss mask, arrays of both; and where documents came from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from lightscale.data_pipeline.store.origins import Origin
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.store.verify import verify_store
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


def test_arrays_of_tokens_come_back_are_verified_and_decide_the_fingerprint(
    tmp_path: Path, byte_tokenizer: TiktokenTokenizer
) -> None:
    generator = np.random.default_rng(1)
    texts = [generator.integers(0, 256, length, dtype=np.uint32) for length in (0, 5, 70, 1, 9, 40)]
    weights = [generator.standard_normal(len(ids) + 1).astype(np.float32) for ids in texts]
    pairs = [generator.integers(0, 9, (len(ids) + 1, 2)).astype(np.int32) for ids in texts]
    fingerprints = set()
    for number, change in enumerate((0, 1)):
        weights[3][1] += change
        path = tmp_path / str(number)
        with StoreWriter(path, byte_tokenizer, shard_tokens=64, chunk_tokens=16) as writer:
            source = writer.source("a", has_loss_mask=True, tokens={"weight": "float32", "pair": ("int32", (2,))})
            for ids, weight, pair in zip(texts, weights, pairs, strict=True):
                source.append(ids, num_bytes=0, tokens={"weight": weight, "pair": pair})
            writer.finish({})
        store = TokenStore(path)
        fingerprints.add(store.fingerprint())
        opened = store.source("a")
        types = {"loss_mask": np.dtype("u1"), "pair": np.dtype(("<i4", (2,))), "weight": np.dtype("<f4")}
        assert opened.token_arrays == types
        for name, values in (("weight", np.concatenate(weights)), ("pair", np.concatenate(pairs))):
            assert np.array_equal(opened.token_values(name, 0, opened.num_tokens), values)
            assert np.array_equal(opened.token_values(name, 60, 70), values[60:70]), "over the edge of two shards"
            assert np.array_equal(zarr.open_array(path / "a" / f"per_token.{name}", mode="r")[:], values)
        assert opened.token_values("loss_mask", 0, 9).tolist() == [1] * 9
        assert verify_store(path, lambda step, done, total: None).faults == []
    assert len(fingerprints) == 2
    with pytest.raises(UserError, match=r"source a: no token array 'reward'; it has loss_mask, pair, weight"):
        opened.token_values("reward", 0, 1)
    shard = path / "a/per_token.weight/c/1"
    raw = bytearray(shard.read_bytes())
    raw[7] ^= 1
    shard.write_bytes(raw)
    (fault,) = verify_store(path, lambda step, done, total: None).faults
    assert "per_token.weight/c/1" in fault
    assert "block 0 (per_token.weight 64 to 127)" in fault
    with pytest.raises(UserError, match=r"per_token.weight/c/1"):
        TokenStore(path).source("a").token_values("weight", 64, 65)


def test_a_store_without_arrays_is_what_it_always_was(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> None:
    with StoreWriter(tmp_path / "store", byte_tokenizer, shard_tokens=64, chunk_tokens=16) as writer:
        source = writer.source("a")
        for length in (3, 90, 7):
            source.append(np.arange(length, dtype=np.uint32), num_bytes=length)
        writer.finish({})
    group = zarr.open_group(tmp_path / "store/a", mode="r")
    assert sorted(name for name, _ in group.arrays()) == ["doc_ends", "tokens"]
    assert set(group.attrs) == {
        *("split", "documents", "tokens", "bytes", "content_hash", "shard_hashes", "block_bytes", "block_hashes"),
    }
    # Computed by the version before stores had arrays of tokens.
    assert group.attrs["content_hash"] == "b1d56a9cdba518ae9ee29b95838fc202"


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
        ({"tokens": {}}, r"tokens \[\]: the source has \['weight'\]"),
        (
            {"tokens": {"weight": [1.0] * 3}},
            r"tokens: weight = float64 of shape \(3,\): must be float32 of shape \(4,\)",
        ),
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
        documents = {"label": "int32", "target": ("float32", (3,))}
        source = writer.source("a", has_loss_mask=True, tokens={"weight": "float32"}, documents=documents)
        with pytest.raises(ValueError, match=message):
            source.append(
                np.arange(3, dtype=np.uint32),
                num_bytes=3,
                **{"documents": {"label": 1, "target": [1.0] * 3}, "tokens": {"weight": [1.0] * 4}, **arguments},
            )
        with pytest.raises(ValueError, match="tokens: loss_mask: create the source with has_loss_mask"):
            writer.source("e", tokens={"loss_mask": "uint8"})
        with pytest.raises(ValueError, match=r"token array 'w' of float64"):
            writer.source("f", tokens={"w": "float64"})
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
