"""How much a loader reads, and how long it takes to go on in the middle of 300 billion tokens."""

import json
import os
import runpy
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.store.blocks import GROUP_BLOCKS, BlockHashes
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sparse_store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """300 billion tokens in 70 shards that take no room: 4096 documents of zeros."""
    write_sparse_store = runpy.run_path(str(ROOT / "tools" / "benchmarks" / "corpora" / "loader.py"))[
        "write_sparse_store"
    ]
    store: TokenStore = write_sparse_store(tmp_path_factory.mktemp("sparse") / "store")
    assert store.source("web").num_tokens == 300_000_000_000
    return store


@pytest.mark.parametrize("packing", ["concat", "whole"])
def test_resume_in_the_middle_of_300_billion_tokens(sparse_store: TokenStore, tmp_path: Path, packing: Any) -> None:
    """From an open store: the loader, its state, and the first batch of 8 × 8,192 tokens, in under 50 ms."""

    def make() -> TokenLoader:
        return TokenLoader(
            sparse_store,
            sequence_length=8192,
            global_batch_size=512,
            micro_batch_size=8,
            packing=packing,
            layout=LoaderLayout(data_rank=3, data_size=64),
            index_dir=tmp_path,
        )

    first = make()  # makes the index of `whole`, once for a run
    state = json.loads(json.dumps(first.state_dict() | dict.fromkeys(("tokens", "position"), 35_000 * 512 * 8192)))
    taken = []
    for _ in range(5):
        begun = time.process_time()
        loader = make()
        loader.load_state_dict(state)
        (batch,) = loader.next_step()
        taken.append(time.process_time() - begun)
    assert batch.tokens.shape == (8, 8192)
    assert min(taken) < 0.05, f"{min(taken) * 1e3:.0f} ms"
    print(f"{packing}: {min(taken) * 1e3:.1f} ms")


@pytest.fixture
def small_store(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> TokenStore:
    """60,200 tokens in shards of 16,384, four blocks each."""
    with StoreWriter(tmp_path / "store", byte_tokenizer, shard_tokens=16_384, chunk_tokens=64) as writer:
        source = writer.source("a")
        generator = np.random.default_rng(0)
        for _ in range(200):
            source.append(generator.integers(0, 256, 300, dtype=np.uint32), num_bytes=300)
        writer.finish({})
    return TokenStore(tmp_path / "store")


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that were read, by array; of block hashes by ``hashes``."""
    found: Counter[str] = Counter()
    preadv, read_group = os.preadv, BlockHashes._read_group

    def counting(descriptor: int, buffers: Any, position: int) -> int:
        count = preadv(descriptor, buffers, position)
        found[Path(f"/proc/self/fd/{descriptor}").readlink().parts[-3]] += count
        return count

    def counting_hashes(self: BlockHashes, *arguments: int) -> bytes:
        hashes = read_group(self, *arguments)
        found["hashes"] += len(hashes)
        return hashes

    monkeypatch.setattr(os, "preadv", counting)
    monkeypatch.setattr(BlockHashes, "_read_group", counting_hashes)
    return found


def test_a_sequence_rank_reads_its_slice_and_one_token(small_store: TokenStore, read_bytes: Counter[str]) -> None:
    source = small_store.source("a")
    source.read(0, source.num_tokens)  # blocks that are read first are read whole
    for sequence_size in (1, 4, 16):
        layout = LoaderLayout(sequence_rank=sequence_size // 2, sequence_size=sequence_size)
        loader = TokenLoader(small_store, sequence_length=4096, global_batch_size=4, micro_batch_size=2, layout=layout)
        loader.next_step()
        read_bytes.clear()
        loader.next_step()
        assert read_bytes["tokens"] == 4 * (4096 // sequence_size + 1) * 4
        # Where documents end is found in a map of the file; what is read of it beside that is next to nothing.
        assert read_bytes["doc_ends"] <= 4 * (4096 // sequence_size // 301 + 3) * 8
        assert read_bytes["hashes"] == 0


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 8190, 20_000, 60_200 - 8193])
def test_a_sample_of_8k_tokens_that_is_read_first_reads_less_than_twice_its_bytes(
    small_store: TokenStore, read_bytes: Counter[str], start: int
) -> None:
    source = TokenStore(small_store.path).source("a")
    read_bytes.clear()
    source.read(start, start + 8193)
    assert 8193 * 4 <= read_bytes["tokens"] <= 3 * 2**14
    # In a store of any size: at a place where the hashes are in two groups of 512.
    assert read_bytes["hashes"] <= 2 * 4 * 8  # all hashes of two shards
    assert 3 * 2**14 + 2 * GROUP_BLOCKS * 8 < 2 * 8193 * 4
