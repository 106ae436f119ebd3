import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.config.schema import DataConfig
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.store.several_stores import SeveralStores, open_stores
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import AsciiTokenizer
from lightscale.errors import UserError

LENGTH = 16
WriteStore = Callable[..., TokenStore]


def documents(count: int, seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, generator.integers(1, 60)).tolist() for _ in range(count)]


@pytest.fixture
def stores(write_store: WriteStore) -> dict[str, TokenStore]:
    """Two sources of one name in different stores, and one that holds validation data."""
    return {
        "web": write_store({"a": documents(30, 1), "b": documents(9, 2), "b-validation": documents(5, 3)}, "web"),
        "code": write_store({"a": documents(20, 4)}, "code"),
    }


def config(stores: dict[str, TokenStore], weights: dict[str, float] | None = None, **changes: Any) -> DataConfig:
    entries = {
        name: {"path": str(store.path), **({"weight": weights[name]} if weights else {})}
        for name, store in stores.items()
    }
    return DataConfig.model_validate({"stores": entries, "sequence_length": LENGTH, **changes})


def make_loader(store: TokenStore, **changes: Any) -> TokenLoader:
    arguments: dict[str, Any] = {"sequence_length": LENGTH, "global_batch_size": 12, "micro_batch_size": 2, "seed": 5}
    return TokenLoader(store, **(arguments | changes))


def test_each_store_has_its_share_and_each_window_comes_once_an_epoch(stores: dict[str, TokenStore]) -> None:
    weights = {"web": 0.700001, "code": 0.299999}
    store = open_stores(config(stores, weights))
    loader = make_loader(store, global_batch_size=40, micro_batch_size=1)
    # In its store each source keeps the share that it has there alone: here by its tokens.
    own = {name: stores["web"].source(name).num_tokens for name in ("a", "b")}
    expected = {"web/a": 0.700001 * own["a"] / sum(own.values()), "web/b": 0.700001 * own["b"] / sum(own.values())}
    expected["code/a"] = 0.299999
    assert set(loader.mixture.names) == set(expected)
    for name, parts in zip(loader.mixture.names, loader.mixture.parts, strict=True):
        assert abs(Fraction(parts, loader.mixture.period) - Fraction(expected[name])) <= 1e-6

    drawn: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for step in range(20):
        samples = loader.step_after(loader.step_tokens.after(step))
        [batch] = [loader.batches_after(loader.step_tokens.after(step))[0]]
        row = batch.tokens[0].tolist()
        first = samples.locations[0]
        source, own_name = first.source.split("/")
        begin = first.window * LENGTH
        assert row == stores[source].source(own_name).read(begin, begin + LENGTH).tolist()
        for location in samples.locations:
            drawn[location.source][location.epoch].append(location.window)
    counts = {name: sum(map(len, epochs.values())) for name, epochs in drawn.items()}
    assert all(abs(counts[name] - expected[name] * 800) <= 1 for name in expected)
    for name, epochs in drawn.items():
        store_name, own_name = name.split("/")
        num_windows = (stores[store_name].source(own_name).num_tokens - 1) // LENGTH
        *whole, last = sorted(epochs)
        assert whole == list(range(last)) and last >= 1, "a new epoch begins when the one before was read"
        assert all(sorted(epochs[epoch]) == list(range(num_windows)) for epoch in whole)
        assert max(Counter(epochs[last]).values()) == 1
        assert epochs[0] != sorted(epochs[0])


def test_any_number_of_data_ranks_goes_on_anywhere(stores: dict[str, TokenStore]) -> None:
    store = open_stores(config(stores))
    by_tokens = {name: s.num_tokens for name, s in store.sources.items() if s.split == "train"}
    one = make_loader(store)
    assert one.mixture.names == tuple(sorted(by_tokens))
    for name, parts in zip(one.mixture.names, one.mixture.parts, strict=True):
        assert parts / one.mixture.period == pytest.approx(by_tokens[name] / sum(by_tokens.values()), abs=1e-6)
    whole = [[row for batch in one.next_step() for row in batch.tokens.tolist()] for _ in range(9)]
    state: Any = None
    found = []
    for step in range(9):  # each step on another number of ranks than the one before, all resumed from its state
        size = (1, 2, 3, 6)[step % 4]
        rows: dict[int, list[int]] = {}
        for rank in range(size):
            loader = make_loader(open_stores(config(stores)), layout=LoaderLayout(data_rank=rank, data_size=size))
            if state is not None:
                loader.load_state_dict(state)
            for number, batch in enumerate(loader.next_step()):
                for row, tokens in enumerate(batch.tokens.tolist()):
                    rows[(number * size + rank) * 2 + row] = tokens
        state = loader.state_dict()
        found.append([rows[number] for number in sorted(rows)])
    assert found == whole


def test_other_stores_names_or_weights_are_refused_on_resume(
    stores: dict[str, TokenStore], write_store: WriteStore
) -> None:
    state = make_loader(open_stores(config(stores, {"web": 3, "code": 1}))).state_dict()
    make_loader(open_stores(config(stores, {"web": 0.75, "code": 0.25}))).load_state_dict(state)  # only ratios count
    other = write_store({"a": documents(20, 9)}, "other")
    for changed, weights, message in (
        (stores, {"web": 2, "code": 1}, "weight of code/a: 15750/63000 before"),
        ({"web": stores["web"], "code": other}, {"web": 3, "code": 1}, "source code/a: "),
        ({"web": stores["web"], "c": stores["code"]}, {"web": 3, "c": 1}, "source code/a: .* None now"),
        ({"web": stores["web"]}, {"web": 3}, "source code/a: .* None now"),
    ):
        with pytest.raises(
            UserError, match=(rf"^web \(.*/web\).*the data differs from the data of the earlier steps.*{message}")
        ):
            make_loader(open_stores(config(changed, weights))).load_state_dict(state)


def test_one_store_is_read_as_ever(stores: dict[str, TokenStore]) -> None:
    data = DataConfig.model_validate({"store": str(stores["web"].path), "sequence_length": LENGTH})
    opened = open_stores(data)
    assert type(opened) is TokenStore and opened.fingerprint() == stores["web"].fingerprint()
    # Fixed once and for all: a run of before must go on with the same samples.
    assert make_loader(opened).step_after(0).locations == make_loader(stores["web"]).step_after(0).locations
    assert data.store_paths == {"data.store": stores["web"].path}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "exactly one of data.store and data.stores; neither is given"),
        ({"store": "x", "stores": {"a": {"path": "y"}}}, "exactly one of .*both are given"),
        ({"stores": {"a": {"path": "x", "weight": 1.0}, "b": {"path": "y"}}}, "a has a weight and b not"),
        ({"stores": {"a": {"path": "x", "weight": 0.0}}}, "stores.a.weight"),
        ({"stores": {"a/b": {"path": "x"}}}, "the name 'a/b' becomes part"),
        ({"stores": {"a": {"path": "x", "weight": 1.0}}, "sources": {"a/b": 1.0}}, "both set weights"),
    ],
)
def test_mistakes_in_the_configuration(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"sequence_length": LENGTH, **table})


def test_stores_that_do_not_go_together_are_named(
    stores: dict[str, TokenStore], write_store: WriteStore, tmp_path: Path
) -> None:
    with StoreWriter(tmp_path / "ascii", AsciiTokenizer()) as writer:
        writer.source("a").append(np.arange(9, dtype=np.uint32), num_bytes=9)
        writer.finish({})
    with pytest.raises(UserError, match=r"data\.stores\.x = .*ascii was written with another tokenizer .*stores\.web"):
        SeveralStores({"web": stores["web"].path, "x": tmp_path / "ascii"})
    shutil.copytree(stores["code"].path, tmp_path / "copy")
    with pytest.raises(UserError, match=r"data\.stores\.again = .*copy has the same content as data\.stores\.code = "):
        SeveralStores({"code": stores["code"].path, "again": tmp_path / "copy"})
    with pytest.raises(UserError, match="nowhere: no token store"):
        SeveralStores({"web": stores["web"].path, "x": tmp_path / "nowhere"})
    with pytest.raises(UserError, match=r"no source 'code/b'; use one of web/a, web/b, web/b-validation, code/a"):
        make_loader(open_stores(config(stores)), sources={"code/b": 1.0})
    only = write_store({"v-validation": documents(3, 1)}, "only")
    with pytest.raises(UserError, match=r"only: all its sources \(v-validation\) hold validation data"):
        SeveralStores({"web": stores["web"].path, "only": only.path})


def test_damage_is_named_in_the_store_that_has_it(stores: dict[str, TokenStore]) -> None:
    shard = stores["code"].path / "a" / "tokens" / "c" / "0"
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    loader = make_loader(open_stores(config(stores)), sources={"code/a": 1.0})
    with pytest.raises(UserError, match=rf"{stores['code'].path}/a/tokens/c/0: .*block 0"):
        [loader.next_step() for _ in range(20)]


@pytest.mark.long
def test_a_rank_opens_only_the_shards_it_reads(write_store: WriteStore) -> None:
    """Of two stores with thousands of shards; files that are opened are counted by Python itself."""
    tokens = [[number % 200] * 63 for number in range(3000)]  # 64 tokens with end of text, in shards of 64
    one, two = write_store({"a": tokens}, "one"), write_store({"a": tokens[1:]}, "two")
    opened: list[str] = []
    counting = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if counting[0] and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    loader = make_loader(open_stores(config({"one": one, "two": two})), layout=LoaderLayout(data_size=6))
    before = len(opened)
    loader.next_step()
    counting[0] = False
    # A window of 17 tokens: one shard of tokens (or two), of document ends, and the hashes of each.
    assert before < 60, "opening does not grow with the shards"
    assert len(opened) - before < 200 and any("/one/" in path or "/two/" in path for path in opened)
