import errno
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zarr

from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, Tokenizer, load_tokenizer
from lightscale.errors import UserError

EOT = 256
DOCUMENTS = {"code": [[1, 2, 3], [], list(range(100))], "text": [[7] * 70] * 3, "text-validation": [[9, 8]]}
WriteStore = Callable[..., TokenStore]


def test_the_layout_of_tokens_and_documents(write_store: WriteStore) -> None:
    store = write_store(DOCUMENTS)
    for name, documents in DOCUMENTS.items():
        source = store.source(name)
        expected = [token for ids in documents for token in (EOT, *ids)]
        assert source.read(0, source.num_tokens).tolist() == expected
        assert (source.num_documents, source.num_tokens) == (len(documents), len(expected))
        assert source.num_bytes == sum(map(len, documents))
        assert source.split == ("validation" if name == "text-validation" else "train")
        for index, ids in enumerate(documents):
            start, stop = source.document(index)
            assert source.read(start, stop).tolist() == [EOT, *ids]


def test_plain_zarr_reads_the_store(write_store: WriteStore) -> None:
    path = write_store(DOCUMENTS).path
    root = zarr.open_group(path, mode="r")
    for name, documents in DOCUMENTS.items():
        tokens, ends = root[f"{name}/tokens"], root[f"{name}/doc_ends"]
        assert isinstance(tokens, zarr.Array)
        assert isinstance(ends, zarr.Array)
        assert (str(tokens.dtype), str(ends.dtype)) == ("uint32", "uint64")
        assert np.asarray(tokens[:]).tolist() == [token for ids in documents for token in (EOT, *ids)]
        assert np.asarray(ends[:]).tolist() == np.cumsum([len(ids) + 1 for ids in documents]).tolist()
        # What zarr decodes is what lies in the files.
        num_shards = -(-tokens.shape[0] // 64)
        files = [path / name / "tokens" / "c" / str(shard) for shard in range(num_shards)]
        raw = b"".join(file.read_bytes()[: 64 * 4] for file in files)
        assert raw[: 4 * tokens.shape[0]] == np.asarray(tokens[:]).tobytes()
    assert root.attrs["sources"] == sorted(DOCUMENTS)
    assert root["code"].attrs["documents"] == 3


def test_hashes_are_those_of_the_files(write_store: WriteStore) -> None:
    store = write_store(DOCUMENTS)
    for name in DOCUMENTS:
        attributes = json.loads((store.path / name / "zarr.json").read_text())["attributes"]
        digests = {}
        for array, hashes in attributes["shard_hashes"].items():
            files = [store.path / name / array / "c" / str(shard) for shard in range(len(hashes))]
            digests[array] = [xxhash.xxh3_128(file.read_bytes()).digest() for file in files]
            assert [digest.hex() for digest in digests[array]] == hashes
        whole = xxhash.xxh3_128(b"".join(digests["tokens"] + digests["doc_ends"])).hexdigest()
        assert attributes["content_hash"] == store.source(name).content_hash == whole


def test_document_starts(write_store: WriteStore) -> None:
    lengths = np.random.default_rng(0).integers(0, 12, 150).tolist()
    source = write_store({"a": [[1] * length for length in lengths]}).source("a")
    all_starts = [index for index, token in enumerate(source.read(0, source.num_tokens)) if token == EOT]
    for start in range(0, source.num_tokens, 7):
        for stop in (start + 1, start + 20, source.num_tokens):
            stop = min(stop, source.num_tokens)
            before = max(first for first in all_starts if first <= start)
            expected = [before, *(first for first in all_starts if start < first < stop)]
            assert source.document_starts(start, stop).tolist() == expected


@pytest.mark.parametrize("shards", [8, 64, 4096])
@pytest.mark.parametrize("first", [0, 100])
def test_document_starts_of_many_ranges(write_store: WriteStore, shards: int, first: int) -> None:
    """All in one shard or not, the source's first document among them or not, in any order."""
    lengths = np.random.default_rng(0).integers(0, 12, 150).tolist()
    source = write_store({"a": [[1] * length for length in lengths]}, shards=shards).source("a")
    for num_tokens in (1, 20):
        starts = np.random.default_rng(1).permutation(np.arange(first, source.num_tokens - num_tokens, 13))
        found, counts = source.document_starts_each(starts, num_tokens)
        expected = [source.document_starts(start, start + num_tokens).tolist() for start in starts.tolist()]
        assert counts.tolist() == list(map(len, expected))
        assert found.tolist() == [start for starts in expected for start in starts]


def test_the_same_documents_give_the_same_files(write_store: WriteStore) -> None:
    first, second = (write_store(DOCUMENTS, name).path for name in ("first", "second"))
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    assert len(names) > 10
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_the_fingerprint_tells_stores_apart(write_store: WriteStore) -> None:
    changed_token = {**DOCUMENTS, "code": [[1, 2, 4], [], list(range(100))]}
    moved_end = {**DOCUMENTS, "code": [[1, 2], [3], list(range(100))]}
    fewer = {name: DOCUMENTS[name] for name in ("code", "text")}
    variants = [DOCUMENTS, changed_token, moved_end, fewer, {**fewer, "other-validation": [[9, 8]]}]
    fingerprints = [write_store(variant, str(number)).fingerprint() for number, variant in enumerate(variants)]
    assert len(set(fingerprints)) == len(variants)
    assert write_store(DOCUMENTS, "again").fingerprint() == fingerprints[0]


def test_the_store_carries_its_tokenizer(write_store: WriteStore, byte_tokenizer: Tokenizer) -> None:
    store = write_store(DOCUMENTS)
    tokenizer = load_tokenizer(store.path)
    assert store.tokenizer.sha256 == tokenizer.sha256 == byte_tokenizer.sha256
    assert (store.tokenizer.eot_id, store.tokenizer.vocab_size) == (EOT, 257)


def test_a_store_is_never_overwritten(tmp_path: Path, write_store: WriteStore, byte_tokenizer: Tokenizer) -> None:
    kept = write_store(DOCUMENTS).path
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("nowhere")
    for path in (kept, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(UserError, match="never overwritten"), StoreWriter(path, byte_tokenizer):
            pytest.fail("the writer began")
    assert (tmp_path / "file").read_text() == "kept"
    assert TokenStore(kept).source("code").num_documents == 3
    (tmp_path / "empty").mkdir()
    assert write_store(DOCUMENTS, "empty").source("code").num_documents == 3


def test_a_path_taken_while_writing_is_left_alone(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    path = tmp_path / "store"
    with StoreWriter(path, byte_tokenizer) as store:
        store.source("a").append(np.array([1], dtype=np.uint32), num_bytes=1)
        path.write_text("somebody else's")
        with pytest.raises(UserError, match="never overwritten"):
            store.finish({})
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
    assert path.read_text() == "somebody else's"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_store_leaves_nothing(
    tmp_path: Path, byte_tokenizer: Tokenizer, error: type[BaseException]
) -> None:
    def write_some() -> None:
        with StoreWriter(tmp_path / "store", byte_tokenizer, shard_tokens=64, chunk_tokens=8) as store:
            store.source("a").append(np.arange(250, dtype=np.uint32), num_bytes=1)
            store.source("a2").append(np.arange(250, dtype=np.uint32), num_bytes=1)
            assert not (tmp_path / "store").exists()
            raise error

    with pytest.raises(error):
        write_some()
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_documents_is_refused(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    with StoreWriter(tmp_path / "store", byte_tokenizer) as store:
        store.source("a")
        with pytest.raises(UserError, match="the corpus is empty"):
            store.finish({})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-a", "tokenizer", "zarr.json", "字"])
def test_names_that_are_no_source_names(tmp_path: Path, byte_tokenizer: Tokenizer, name: str) -> None:
    with StoreWriter(tmp_path / "store", byte_tokenizer) as store, pytest.raises(UserError, match="source name"):
        store.source(name)


def test_a_source_cannot_be_given_twice(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    with StoreWriter(tmp_path / "store", byte_tokenizer) as store:
        store.source("a")
        with pytest.raises(UserError, match=r"'a': the name is in use"):
            store.source("a")


@pytest.fixture
def tiny_disk(make_disk: Callable[[int], Path]) -> Path:
    """A file system with room for 256 KiB."""
    return make_disk(256 << 10)


def test_a_full_disk_is_one_clear_error(tiny_disk: Path, byte_tokenizer: TiktokenTokenizer) -> None:
    (tiny_disk / "earlier").write_bytes(b"kept" * 1000)

    def fill() -> None:
        path = tiny_disk / "store"
        with StoreWriter(path, byte_tokenizer, shard_tokens=2**12, chunk_tokens=2**8) as store:
            source = store.source("a")
            for _ in range(200):
                source.append(np.zeros(1000, dtype=np.uint32), num_bytes=1)
            store.finish({})

    with pytest.raises(UserError, match=rf"{tiny_disk}/store: cannot write the store .*No space left on device"):
        fill()
    assert [entry.name for entry in tiny_disk.iterdir()] == ["earlier"]
    assert (tiny_disk / "earlier").read_bytes() == b"kept" * 1000


FILL_BY_LIMIT = """
    import resource, sys
    from pathlib import Path
    import numpy as np
    from lightscale.data_pipeline.store.token_store import StoreWriter
    from lightscale.data_pipeline.tokenizers import load_tokenizer
    from lightscale.errors import UserError

    tokenizer = load_tokenizer(Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
    try:
        with StoreWriter(Path(sys.argv[2]), tokenizer) as store:
            store.source("a").append(np.zeros(1_000_000, dtype=np.uint32), num_bytes=1)
            store.finish({})
    except UserError as error:
        print(error)
"""


@pytest.mark.parametrize("limit_bytes", [300, 100_000, 4_200_000])
def test_a_limit_on_file_size_is_met_like_a_full_disk(
    tmp_path: Path, write_store: WriteStore, limit_bytes: int
) -> None:
    """The limits stop at metadata or the tokenizer, in the middle of a shard, and at a shard's index."""
    tokenizer_of = write_store(DOCUMENTS, "earlier").path
    script = textwrap.dedent(FILL_BY_LIMIT)
    result = subprocess.run(
        [sys.executable, "-c", script, tokenizer_of, tmp_path / "store", str(limit_bytes)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "store: cannot write the store" in result.stdout
    assert os.strerror(errno.EFBIG) in result.stdout and "raise the limit of the size of files" in result.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["earlier"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    (tmp_path / "file").write_text("")
    writer = StoreWriter(tmp_path / "file" / "store", byte_tokenizer)
    with pytest.raises(UserError, match=r"file/store: cannot create .*file"), writer:
        pytest.fail("the writer began")


def test_a_missing_store(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no token store"):
        TokenStore(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no zarr\.json"):
        TokenStore(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "code" / "zarr.json").unlink(), r"code/zarr\.json: No such file"),
        (lambda path: shutil.rmtree(path / "code"), r"code/zarr\.json: No such file"),
        (lambda path: shutil.rmtree(path / "code" / "tokens"), r"code/tokens/zarr\.json: No such file"),
        (lambda path: shutil.rmtree(path / "code" / "doc_ends"), r"code/doc_ends/zarr\.json: No such file"),
        (lambda path: shutil.rmtree(path / "text" / "tokens" / "c"), r"text/tokens/c/0: No such file"),
        (lambda path: (path / "text" / "tokens" / "c" / "2").unlink(), r"text/tokens/c/2: No such file"),
        (lambda path: os.truncate(path / "text" / "tokens" / "c" / "1", 100), r"text/tokens/c/1: 100 bytes"),
        (lambda path: os.truncate(path / "text" / "doc_ends" / "c" / "0", 8), r"text/doc_ends/c/0: 8 bytes"),
        (lambda path: (path / "zarr.json").write_text("{"), r"store/zarr\.json: not JSON"),
        (lambda path: (path / "zarr.json").write_text("{}"), r"store/zarr\.json: not the metadata"),
        (lambda path: edit_attributes(path, format="other"), r"store/zarr\.json: format 'other'"),
        (lambda path: edit_attributes(path, format_version=9), r"store/zarr\.json: format version 9, .* reads 1 to 2"),
        (lambda path: edit_attributes(path, tokenizer={}), r"store/zarr\.json: damaged attributes"),
        (lambda path: edit_attributes(path / "code", tokens=7), r"code/tokens: \d+ values instead of 7"),
        (lambda path: edit_attributes(path / "code", documents=2), r"code/doc_ends: 3 values instead of 2"),
        (lambda path: edit_attributes(path / "code", bytes=None), r"code/zarr\.json: damaged attributes"),
        (
            lambda path: set_last_end(path / "code", 107),
            r"code/doc_ends/c/0: source code, shard 0, block 0 \(doc_ends 0 to 2\)",
        ),
    ],
)
def test_a_damaged_store_is_refused_by_file(
    write_store: WriteStore, damage: Callable[[Path], object], message: str
) -> None:
    path = write_store(DOCUMENTS).path
    damage(path)
    with pytest.raises(UserError, match=message):
        read_all(path)


def read_all(path: Path) -> None:
    for source in TokenStore(path).sources.values():
        source.read(0, source.num_tokens)


_opened: list[str] = []
sys.addaudithook(lambda event, args: _opened.append(str(args[0])) if event == "open" else None)


@pytest.mark.parametrize("num_documents", [60, 500])
def test_opening_costs_as_many_opens_whatever_the_number_of_shards(write_store: WriteStore, num_documents: int) -> None:
    """A thousand ranks open each the shards that they read, not all that there are."""
    generator = np.random.default_rng(5)
    documents = generator.integers(0, 256, size=(num_documents, 15))
    path = write_store({"words": documents.tolist()}, shards=16).path

    def num_opened() -> int:
        return sum(name.startswith(str(path)) for name in _opened)

    _opened.clear()
    words = TokenStore(path).source("words")
    before = num_opened()
    # The metadata of store, source, its two arrays and their block hashes; the last shard of ends and its hashes.
    assert before <= 12
    for number in (3, num_documents // 2, num_documents - 2):
        np.testing.assert_array_equal(words.read(16 * number + 1, 16 * (number + 1)), documents[number])
    # A shard of tokens and the file of its hashes for each.
    assert num_opened() - before == 6
    starts, counts = words.document_starts_each(np.array([16 * (num_documents // 3)]), 40)
    np.testing.assert_array_equal(starts, 16 * (num_documents // 3 + np.arange(3)))
    assert counts.tolist() == [3]
    # A bisection among the last ends of the shards of ends, for the begin and for the end of the window.
    num_shards = -(-num_documents // 16)
    assert num_opened() - before - 6 <= 2 * 2 * (math.log2(num_shards) + 2)


def edit_attributes(group: Path, **changes: object) -> None:
    path = group / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["attributes"] |= changes
    path.write_text(json.dumps(metadata))


def set_last_end(source: Path, end: int) -> None:
    path = source / "doc_ends" / "c" / "0"
    raw = bytearray(path.read_bytes())
    raw[16:24] = end.to_bytes(8, "little")
    path.write_bytes(raw)


def test_an_unknown_source_names_the_known_ones(write_store: WriteStore) -> None:
    with pytest.raises(UserError, match="no source 'prose'; use one of code, text, text-validation"):
        write_store(DOCUMENTS).source("prose")
