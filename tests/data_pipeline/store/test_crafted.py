"""Stores that somebody made up: refused at once, by file and key, without asking for memory."""

import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.errors import UserError

_MORE_MEMORY = 256 * 2**20


@pytest.fixture
def store(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> Path:
    with StoreWriter(tmp_path / "store", byte_tokenizer, shard_tokens=64, chunk_tokens=16) as writer:
        for name in ("a", "b"):
            writer.source(name).append(np.arange(100, dtype=np.uint32), num_bytes=100)
        writer.finish({})
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """An allocation of terabytes succeeds on many machines, until it is used: here it fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MORE_MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


Edit = Callable[[dict[str, Any]], object]


def root(**changes: Any) -> tuple[str, Edit]:
    return "zarr.json", lambda metadata: metadata["attributes"].update(changes)


def tokenizer(**changes: Any) -> tuple[str, Edit]:
    return "zarr.json", lambda metadata: metadata["attributes"]["tokenizer"].update(changes)


def source(**changes: Any) -> tuple[str, Edit]:
    return "a/zarr.json", lambda metadata: metadata["attributes"].update(changes)


def shape(*lengths: Any) -> tuple[str, Edit]:
    return "a/tokens/zarr.json", lambda metadata: metadata.update(shape=list(lengths))


def chunks(shard: Any, chunk: Any) -> tuple[str, Edit]:
    def edit(metadata: dict[str, Any]) -> None:
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = [shard]
        metadata["codecs"][0]["configuration"]["chunk_shape"] = [chunk]

    return "a/tokens/zarr.json", edit


CRAFTED: dict[str, tuple[tuple[str, Edit], str]] = {
    "sources twice": (root(sources=["a", "b", "a"]), r"store/zarr\.json: sources: 'a' is listed twice"),
    "sources absolute": (root(sources=["/etc"]), r"store/zarr\.json: sources: '/etc' is not a valid source name"),
    "sources above": (root(sources=["a", "../store/b"]), r"sources: '\.\./store/b' is not a valid source name"),
    "sources dots": (root(sources=[".."]), r"sources: '\.\.' is not a valid source name"),
    "sources a directory of the store": (
        root(sources=["tokenizer"]),
        "sources: 'tokenizer' is not a valid source name",
    ),
    "sources numbers": (root(sources=[1]), "sources: 1 is not a valid source name"),
    "sources text": (root(sources="ab"), r"sources = 'ab': must be a list of names"),
    "sources none": (root(sources=[]), r"sources = \[\]: must be a list"),
    "version true": (root(format_version=True), r"format version True, this version of lightscale reads"),
    "eot beyond": (tokenizer(eot_id=257), r"tokenizer: eot_id = 257: must be an id below vocab_size = 257"),
    "eot below": (tokenizer(eot_id=-1), r"eot_id = -1: must be an id"),
    "eot text": (tokenizer(eot_id="256"), r"eot_id = '256': must be an id"),
    "vocabulary": (tokenizer(vocab_size=2**40), r"vocab_size = 1099511627776: must be 1 to 2147483647"),
    "vocabulary inf": (tokenizer(vocab_size=float("inf")), "vocab_size = inf: must be 1 to"),
    "tokenizer name": (tokenizer(name=7), "tokenizer: name and sha256 must be strings"),
    "tokenizer keys": (tokenizer(more=7), r"damaged attributes \(tokenizer: .*more"),
    "weights unknown": (root(weights={"a": 0.5, "c": 0.5}), r"weights: no source 'c'; there are a, b"),
    "weights inf": (root(weights={"a": float("inf")}), "weights: a = inf: must be a number above 0"),
    "weights nan": (root(weights={"a": float("nan")}), "weights: a = nan: must be a number above 0"),
    "weights beyond floats": (root(weights={"a": 10**400}), "weights: a = 1000"),
    "weights negative": (root(weights={"a": -1}), "weights: a = -1: must be"),
    "weights text": (root(weights={"a": "1"}), "weights: a = '1': must be"),
    "weights list": (root(weights=["a"]), r"weights = \['a'\]: must be a table"),
    "split": (source(split="test"), r"a/zarr\.json: split = 'test': must be train or validation"),
    "tokens inf": (source(tokens=float("inf")), r"a/zarr\.json: damaged attributes \(tokens = inf"),
    "tokens of a float": (source(tokens=101.0), r"damaged attributes \(tokens = 101\.0"),
    "documents negative": (source(documents=-1), r"damaged attributes \(documents = -1"),
    "tokens many": (source(tokens=2**60), r"a/tokens: 101 values instead of 1152921504606846976"),
    "hashes": (source(shard_hashes=[1]), r"damaged attributes \(shard_hashes: must be a table\)"),
    "hashes of numbers": (
        source(shard_hashes={"tokens": [1]}),
        r"damaged attributes \(shard_hashes of tokens: must be",
    ),
    "block bytes": (
        source(block_bytes=2**50),
        r"a/zarr\.json: block_bytes = \d+: this version of lightscale reads 16384",
    ),
    "block hashes": (source(block_hashes={}), r"damaged attributes \(block_hashes of tokens: must be a table\)"),
    "block digests": (
        source(block_hashes={"tokens": {"digests": ["ab"]}}),
        r"a/zarr\.json: block_hashes of tokens do not cover 101 values",
    ),
    "length of terabytes": (shape(2**60), rf"a/zarr\.json: block_hashes of tokens do not cover {2**60} values"),
    "length beyond": (shape(2**200), r"a/tokens/zarr\.json: shape = .*: must be whole numbers from 1 to 2\^62"),
    "length of a float": (shape(101.0), r"a/tokens/zarr\.json: shape = \[101\.0\]: must be whole numbers"),
    "length inf": (shape(float("inf")), r"a/tokens/zarr\.json: shape = \[inf\]: must be whole numbers"),
    "length true": (shape(True), r"shape = \[True\]: must be whole numbers"),
    "length negative": (shape(-101), r"shape = \[-101\]: must be whole numbers"),
    "axes": (shape(101, 1), r"a/tokens/zarr\.json: shape \[101, 1\]; every zarr chunk must hold whole rows"),
    "shards of terabytes": (chunks(2**50, 2**40), r"a/tokens/zarr\.json: chunk_shape gives 1125899906842624 values"),
    "an index of terabytes": (
        chunks(2**37, 1),
        r"chunk_shape gives 137438953472 values .* and 1 per zarr chunk",
    ),
    "float chunks": (chunks(64, 16.0), r"a/tokens/zarr\.json: chunk_shape = \[16\.0\]: must be whole numbers"),
    "float shards": (chunks(64.5, 16), r"chunk_shape = \[64\.5\]: must be whole numbers"),
    "zero chunks": (chunks(64, 0), r"chunk_shape = \[0\]: must be whole numbers"),
    "chunks that do not divide": (chunks(64, 48), r"a/tokens/zarr\.json: damaged metadata .*cannot be divided"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_store_that_cannot_be_is_refused_by_file_and_key(store: Path, case: str) -> None:
    (name, edit), message = CRAFTED[case]
    metadata = json.loads((store / name).read_text())
    edit(metadata)
    (store / name).write_text(json.dumps(metadata))
    begun = time.process_time()
    with pytest.raises(UserError, match=message):
        TokenStore(store)
    # `verify` says the same, as an error or as a fault.
    try:
        faults = verify_store(store, lambda step, done, total: None).faults
    except UserError as error:
        faults = [str(error)]
    assert faults
    assert time.process_time() - begun < 1


@pytest.mark.parametrize("name", ["zarr.json", "a/zarr.json", "a/tokens/zarr.json"])
@pytest.mark.parametrize(
    "content",
    ["[" * 200_000 + "]" * 200_000, '{"attributes": ' + "1" * 10_000 + "}", '{"a":' * 100_000, "\ud800", "1e999"],
)
def test_json_that_is_no_metadata_is_refused_by_file(store: Path, name: str, content: str) -> None:
    (store / name).write_bytes(content.encode(errors="surrogatepass"))
    begun = time.process_time()
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        TokenStore(store)
    assert time.process_time() - begun < 1
