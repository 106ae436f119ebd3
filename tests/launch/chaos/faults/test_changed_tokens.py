"""Changed tokens: every block of the store refuses to be read, and nothing else was changed."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightscale.data_pipeline.store.blocks import BLOCK_BYTES
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.launch.chaos.faults.changed_tokens import WAYS, changed, token_shards
from lightscale.launch.chaos.stores import copy_store, num_bytes, write_other_store

BLOCK_TOKENS = BLOCK_BYTES // 4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, write_store: Callable[..., None]) -> Path:
    path = tmp_path_factory.mktemp("changed") / "store"
    text, held = (np.random.default_rng(0).integers(1, 64, size) for size in (3 * BLOCK_TOKENS + 100, 500))
    write_store(path, 64, text=text, held=held)
    return path


@pytest.mark.parametrize("way", WAYS)
def test_no_block_can_be_read(store: Path, tmp_path: Path, way: str) -> None:
    copy = tmp_path / "store"
    copy_store(store, copy)
    shards = token_shards(copy)
    assert [path.parts[-4] for path in shards] == ["held", "text"]
    for shard, size in shards.items():
        data = shard.read_bytes()
        source = TokenStore(copy).source(shard.parts[-4])
        assert source.num_tokens * 4 == size
        values = changed(data[:size], way, random.Random(0))
        assert len(values) == size
        shard.write_bytes(values + data[size:])
        # It opens: what is refused are its tokens, each block of them.
        opened = TokenStore(copy).source(shard.parts[-4])
        for start in range(0, source.num_tokens, BLOCK_TOKENS):
            with pytest.raises(UserError, match=rf"source {source.name}, shard 0, block {start // BLOCK_TOKENS} "):
                opened.read(start, start + 1)
        shard.write_bytes(data)
        assert (
            TokenStore(copy).source(source.name).read(0, 9) == TokenStore(store).source(source.name).read(0, 9)
        ).all()


def test_another_store_has_another_fingerprint_and_opens(store: Path, tmp_path: Path) -> None:
    write_other_store(store, tmp_path / "other")
    first, second = TokenStore(store), TokenStore(tmp_path / "other")
    assert first.fingerprint() != second.fingerprint()
    assert first.tokenizer == second.tokenizer and first.sources.keys() == second.sources.keys()
    assert num_bytes(store) > 4 * (first.source("text").num_tokens + first.source("held").num_tokens)
    # Made anew, whatever is there.
    (tmp_path / "other" / "text" / "tokens" / "c" / "0").unlink()
    copy_store(store, tmp_path / "other")
    assert TokenStore(tmp_path / "other").fingerprint() == first.fingerprint()
