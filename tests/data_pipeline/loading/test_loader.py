import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from lightscale.data_pipeline.loading.buffers import Buffers
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader, validation_batches
from lightscale.data_pipeline.loading.order import Location
from lightscale.data_pipeline.loading.packing import WholeWindows
from lightscale.data_pipeline.loading.windows import Batch, Row, read_batch
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.errors import UserError

EOT = 256
LENGTH = 16
WriteStore = Callable[..., TokenStore]


def random_documents(num_documents: int, seed: int, max_length: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, EOT, generator.integers(0, max_length)).tolist() for _ in range(num_documents)]


# Short documents, documents longer than several windows, and one of a window or two.
DOCUMENTS = {
    "code": random_documents(60, seed=1, max_length=12),
    "text": random_documents(9, seed=2, max_length=90),
    "tiny": [[1] * 40],
    "text-validation": random_documents(7, seed=3, max_length=40),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: TiktokenTokenizer) -> TokenStore:
    path = tmp_path_factory.mktemp("stores") / "store"
    with StoreWriter(path, byte_tokenizer, shard_tokens=64, chunk_tokens=8) as writer:
        for name, documents in DOCUMENTS.items():
            source = writer.source(name, "validation" if name == "text-validation" else "train")
            for ids in documents:
                source.append(np.array(ids, dtype=np.uint32), num_bytes=len(ids))
        writer.finish({})
    return TokenStore(path)


def stream(name: str) -> list[int]:
    return [token for ids in DOCUMENTS[name] for token in (EOT, *ids)]


def store_documents(store: TokenStore, name: str = "a") -> list[list[int]]:
    """Read by zarr, cut by the end-of-text tokens."""
    tokens: list[int] = zarr.open_array(store.path / name / "tokens", mode="r")[:].tolist()
    starts = [index for index, token in enumerate(tokens) if token == EOT]
    return [tokens[start:stop] for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True)]


def windows_of(name: str, length: int = LENGTH) -> list[list[int]]:
    tokens = stream(name)
    return [tokens[start : start + length + 1] for start in range(0, len(tokens) - length, length)]


def positions_of(tokens: Sequence[int]) -> list[int]:
    """By scanning: the store's documents begin with the end-of-text token, which no text encodes to."""
    positions, current = [], -1
    for token in tokens:
        current = 0 if token == EOT else current + 1
        positions.append(current)
    return positions


def make_loader(store: TokenStore, **changes: Any) -> TokenLoader:
    arguments: dict[str, Any] = {"sequence_length": LENGTH, "global_batch_size": 12, "micro_batch_size": 2, "seed": 5}
    return TokenLoader(store, **(arguments | changes))


def step_batches(loader: TokenLoader, step_index: int) -> list[Batch]:
    return loader.batches_after(loader.step_tokens.after(step_index))


def locate(loader: TokenLoader, first: int, last: int) -> list[Location]:
    """Where the samples ``first`` … ``last`` - 1 of a run of one stage come from."""
    batch_size = loader.step_tokens.full // loader.sequence_length
    found = []
    for step in range(first // batch_size, -(-last // batch_size)):
        content = loader.step_after(loader.step_tokens.after(step))
        assert content.samples == range(step * batch_size, (step + 1) * batch_size)
        found += content.locations
    return found[first % batch_size :][: last - first]


def rows(batches: Sequence[Batch]) -> list[list[int]]:
    """Every row as its inputs and last label."""
    return [
        [*tokens, labels[-1]]
        for batch in batches
        for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
    ]


@pytest.mark.parametrize("length", [1, 3, 16, 50, 64])
def test_a_batch_is_the_windows_that_its_samples_name(store: TokenStore, length: int) -> None:
    loader = make_loader(store, sequence_length=length, sources={"code": 1, "text": 1})
    for step in range(4):
        batches = step_batches(loader, step)
        assert len(batches) == 6
        located = locate(loader, step * 12, step * 12 + 12)
        wanted = [windows_of(found.source, length)[found.window] for found in located]
        assert rows(batches) == wanted
        sources = [loader.mixture.names[number] for batch in batches for number in batch.sources]
        assert sources == [found.source for found in located]
        assert len(set(sources)) == 2
        for number, batch in enumerate(batches):
            for row in range(2):
                text = wanted[number * 2 + row]
                assert batch.tokens[row].tolist() == text[:-1]
                assert batch.labels[row].tolist() == text[1:]
                # Positions restart at documents and at the window.
                assert batch.positions[row].tolist() == positions_of(text[:-1])
            assert (batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype) == (
                torch.int32,
                torch.int32,
                torch.int64,
            )
            moved = batch.to(torch.device("cpu"))
            assert (moved.tokens.dtype, moved.labels.dtype) == (torch.int64, torch.int64)
            assert torch.equal(moved.tokens, batch.tokens)
            assert batch.loss_mask.dtype == torch.float32
            assert batch.loss_mask.equal(torch.ones(2, length))
            for tensor in (batch.tokens, batch.labels, batch.loss_mask, batch.positions):
                assert tensor.shape == (2, length)


def test_rows_longer_than_a_block_are_filled_whole(write_store: WriteStore) -> None:
    """Long rows are read in blocks: documents begin before, on and after the edges of blocks."""
    block = 2**14
    lengths = [block - 1, block + 1, 5, 3 * block, block - 6, 1, 1, 2 * block + 7]
    generator = np.random.default_rng(0)
    store = write_store({"a": [generator.integers(0, EOT, length - 1).tolist() for length in lengths]}, shards=2**14)
    whole = [token for ids in store_documents(store) for token in ids]
    for first in (0, 3 * block):
        for length, sequence_size in ((2 * block, 2), (3 * block + 2, 2), (block, 1)):
            joined: dict[str, list[int]] = {"tokens": [], "labels": [], "positions": []}
            for rank in range(sequence_size):
                layout = LoaderLayout(sequence_rank=rank, sequence_size=sequence_size)
                loader = make_loader(store, sequence_length=length, global_batch_size=2, layout=layout)
                (batch,) = loader.batches_after(0)
                for name, values in joined.items():
                    values += getattr(batch, name)[first // (3 * block)].tolist()
            start = locate(loader, 0, 2)[first // (3 * block)].window * length
            assert joined["tokens"] == whole[start : start + length]
            assert joined["labels"] == whole[start + 1 : start + length + 1]
            assert joined["positions"] == positions_of(whole[start : start + length])


@pytest.mark.parametrize("shards", [64, 4096])
def test_what_was_found_ahead_is_what_a_new_loader_finds(write_store: WriteStore, shards: int) -> None:
    """Samples are found some hundred at a time, documents by one look-up in a shard or by one in each of several."""
    store = write_store({name: DOCUMENTS[name] for name in ("code", "text")}, shards=shards)

    def make() -> TokenLoader:
        layout = LoaderLayout(data_rank=1, data_size=3, sequence_rank=1, sequence_size=2)
        return make_loader(store, sequence_length=6, layout=layout)

    loader = make()
    begun_before = 0
    for step in [*range(150), 400, 3, 4]:  # of this rank four samples each; then jumps
        fresh = step_batches(make(), step)
        for batch, expected in zip(step_batches(loader, step), fresh, strict=True):
            assert torch.equal(batch.tokens, expected.tokens)
            assert torch.equal(batch.positions, expected.positions)
            begun_before += int((batch.positions[:, 0] > 0).sum())
        windows = [windows_of(found.source, 6)[found.window] for found in locate(loader, step * 12, step * 12 + 12)]
        mine = [windows[sample] for batch in (1, 4) for sample in (2 * batch, 2 * batch + 1)]
        assert rows(fresh) == [window[3:] for window in mine]
        assert [row for batch in fresh for row in batch.positions.tolist()] == [
            positions_of(window[:-1])[3:] for window in mine
        ]
    assert begun_before > 100


def test_every_epoch_of_a_source_has_each_window_once_in_another_order(store: TokenStore) -> None:
    loader = make_loader(store, sources={"code": 2, "text": 1})
    seen: dict[tuple[str, int], list[int]] = {}
    for location in locate(loader, 0, 400):
        seen.setdefault((location.source, location.epoch), []).append(location.window)
    assert {source for source, _ in seen} == {"code", "text"}
    last_epoch = {source: max(epoch for name, epoch in seen if name == source) for source in ("code", "text")}
    assert min(last_epoch.values()) >= 2
    for (source, epoch), windows in seen.items():
        if epoch < last_epoch[source]:
            assert sorted(windows) == list(range(len(windows_of(source))))
    for source in last_epoch:
        assert seen[source, 0] != seen[source, 1]


def test_sources_are_mixed_by_their_tokens_or_by_the_weights_given(store: TokenStore) -> None:
    loader = make_loader(store)
    by_tokens = Counter(location.source for location in locate(loader, 0, 1000))
    assert set(by_tokens) == {"code", "text", "tiny"}
    total = sum(len(stream(name)) for name in by_tokens)
    assert all(abs(by_tokens[name] - 1000 * len(stream(name)) / total) <= 1.01 for name in by_tokens)
    weighted = make_loader(store, sources={"text": 3, "code": 1})
    assert Counter(location.source for location in locate(weighted, 0, 1000)) == {"text": 750, "code": 250}


def test_the_order_does_not_depend_on_the_length_of_the_run_or_the_batch(store: TokenStore) -> None:
    small = make_loader(store, global_batch_size=3, micro_batch_size=1)
    large = make_loader(store, global_batch_size=24, micro_batch_size=8)
    assert rows([batch for step in range(16) for batch in step_batches(small, step)]) == rows(
        [batch for step in range(2) for batch in step_batches(large, step)]
    )
    other_seed = make_loader(store, seed=6)
    assert rows(step_batches(make_loader(store), 0)) != rows(step_batches(other_seed, 0))


@pytest.mark.parametrize(
    ("data_size", "micro_batch_size"), [(1, 1), (1, 12), (2, 1), (2, 3), (3, 2), (3, 4), (4, 3), (6, 2), (12, 1)]
)
def test_data_ranks_share_the_global_batch_out(store: TokenStore, data_size: int, micro_batch_size: int) -> None:
    whole = rows(step_batches(make_loader(store, micro_batch_size=12), 2))
    num_micro_batches = 12 // (data_size * micro_batch_size)
    parts = []
    for rank in range(data_size):
        layout = LoaderLayout(data_rank=rank, data_size=data_size)
        batches = step_batches(make_loader(store, micro_batch_size=micro_batch_size, layout=layout), 2)
        assert len(batches) == num_micro_batches
        parts.append([rows([batch]) for batch in batches])
    in_order = [row for number in range(num_micro_batches) for part in parts for row in part[number]]
    assert in_order == whole


@pytest.mark.parametrize("sequence_size", [2, 4, 8, 16])
def test_sequence_slices_join_to_the_whole(store: TokenStore, sequence_size: int) -> None:
    for data_rank in range(2):
        whole = make_loader(store, layout=LoaderLayout(data_rank=data_rank, data_size=2))
        slices = [
            make_loader(
                store,
                layout=LoaderLayout(data_rank=data_rank, data_size=2, sequence_rank=rank, sequence_size=sequence_size),
            )
            for rank in range(sequence_size)
        ]
        for step in range(6):
            expected = step_batches(whole, step)
            parts = [step_batches(loader, step) for loader in slices]
            for number, batch in enumerate(expected):
                for field in ("tokens", "labels", "loss_mask", "positions"):
                    joined = torch.cat([getattr(part[number], field) for part in parts], dim=1)
                    assert joined.equal(getattr(batch, field)), field


@given(
    num_steps=st.integers(0, 8),
    data_size=st.sampled_from([1, 2, 3]),
    micro_batch_size=st.sampled_from([1, 2]),
    global_batch_size=st.sampled_from([12, 24]),
)
@settings(max_examples=15)
def test_any_layout_resumes_any_other(
    store: TokenStore, num_steps: int, data_size: int, micro_batch_size: int, global_batch_size: int
) -> None:
    first = make_loader(store)
    for _ in range(num_steps):
        first.next_step()
    state = first.state_dict()
    assert state["tokens"] == num_steps * 12 * LENGTH
    second = [
        make_loader(
            store,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            layout=LoaderLayout(data_rank=rank, data_size=data_size),
        )
        for rank in range(data_size)
    ]
    for loader in second:
        loader.load_state_dict(state)
    got = Counter(tuple(row) for loader in second for row in rows(loader.next_step()))
    wanted = locate(make_loader(store), num_steps * 12, num_steps * 12 + global_batch_size)
    assert got == Counter(tuple(windows_of(found.source)[found.window]) for found in wanted)
    assert {loader.tokens for loader in second} == {state["tokens"] + global_batch_size * LENGTH}


def test_next_step_goes_through_the_steps(store: TokenStore) -> None:
    loader = make_loader(store)
    for step in range(5):
        assert rows(loader.next_step()) == rows(step_batches(make_loader(store), step))


def test_state_survives_json_and_is_equal_on_every_rank(store: TokenStore) -> None:
    states = []
    for rank in range(2):
        loader = make_loader(store, layout=LoaderLayout(data_rank=rank, data_size=2))
        loader.next_step()
        states.append(loader.state_dict())
    assert states[0] == states[1] == json.loads(json.dumps(states[0]))


def test_other_data_is_refused_by_what_differs(store: TokenStore, write_store: WriteStore) -> None:
    state = make_loader(store).state_dict()
    changes: dict[str, TokenLoader] = {
        "seed: 5 before, 6 now": make_loader(store, seed=6),
        "sequence_length: 16 before, 8 now": make_loader(store, sequence_length=8),
        "source tiny: .* before, None now": make_loader(store, sources={"code": 1, "text": 1}),
        "weight of code: .* before, 1/3 now": make_loader(store, sources={"code": 1, "text": 1, "tiny": 1}),
        "source code: .* before, .* now": make_loader(
            write_store({**DOCUMENTS, "code": [*DOCUMENTS["code"][:-1], [1, 2, 3]]})
        ),
        "store: .* before, .* now": make_loader(write_store({**DOCUMENTS, "text-validation": [[1]]}, "other")),
    }
    for message, loader in changes.items():
        with pytest.raises(UserError, match=rf"the data differs from the data of the earlier steps \(.*{message}"):
            loader.load_state_dict(state)
        assert loader.tokens == 0
    same = make_loader(write_store(DOCUMENTS, "same"))
    same.load_state_dict(state)


@pytest.mark.parametrize("tokens", [-16, 8, 17])
def test_a_counter_between_samples_is_refused(store: TokenStore, tokens: int) -> None:
    loader = make_loader(store)
    with pytest.raises(UserError, match="not a multiple of sequence_length 16"):
        loader.load_state_dict(loader.state_dict() | {"tokens": tokens})


@pytest.mark.parametrize("num_extra", [0, 1, 15, 16])
def test_what_is_left_at_the_end_of_a_source_is_counted(write_store: WriteStore, num_extra: int) -> None:
    num_tokens = 2 * LENGTH + 1 + num_extra  # end of text included
    loader = make_loader(write_store({"a": [[3] * (num_tokens - 1)]}))
    num_windows, left = (3, 0) if num_extra == 16 else (2, num_extra)
    assert {location.window for location in locate(loader, 0, 12)} == set(range(num_windows))
    assert loader.description() == [
        f"a: 100.00% of the samples; {num_windows} sequences of 16 tokens, {left} tokens at its end skipped"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 1000}, r"source \w+: \d+ tokens are fewer than the 1001 of one sequence"),
        ({"global_batch_size": 7}, r"global_batch_size 7 is not a multiple of micro_batch_size 2 × 1 data ranks \(2\)"),
        ({"layout": LoaderLayout(data_size=5)}, r"global_batch_size 12 is not a multiple of .* × 5 data ranks \(10\)"),
        ({"micro_batch_size": 0}, "micro_batch_size 0"),
        ({"layout": LoaderLayout(sequence_size=3)}, r"sequence_length 16 is not a multiple of .* sequence ranks \(3\)"),
        ({"sources": {"prose": 1.0}}, "no source 'prose'; use one of code, text, text-validation, tiny"),
        ({"sources": {"text-validation": 1.0}}, "text-validation holds validation data; use a training source"),
        ({"sources": {"code": -1.0}}, "source code: the weight is -1.0"),
    ],
)
def test_mistakes_name_both_sides(store: TokenStore, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_loader(store, **changes)


def test_a_store_of_validation_data_alone_cannot_train(write_store: WriteStore) -> None:
    with pytest.raises(UserError, match=r"all its sources \(a-validation\) hold validation data"):
        make_loader(write_store({"a-validation": [[1] * 50]}))


@pytest.mark.parametrize("changes", [{"data_rank": 2, "data_size": 2}, {"sequence_rank": -1}, {"data_size": 0}])
def test_a_rank_outside_its_axis_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="ranks are 0"):
        LoaderLayout(**changes)


@pytest.mark.parametrize("num_sequences", [1, 2, 5, 64])
@pytest.mark.parametrize(("data_size", "micro_batch_size"), [(1, 1), (1, 4), (2, 1), (3, 2)])
def test_validation_reads_the_first_windows_once(
    store: TokenStore, num_sequences: int, data_size: int, micro_batch_size: int
) -> None:
    expected = windows_of("text-validation")[:num_sequences]
    counted, num_batches = [], set()
    for rank in range(data_size):
        batches = list(
            validation_batches(
                store.source("text-validation"),
                sequence_length=LENGTH,
                num_sequences=num_sequences,
                micro_batch_size=micro_batch_size,
                layout=LoaderLayout(data_rank=rank, data_size=data_size),
            )
        )
        num_batches.add(len(batches))
        for number, batch in enumerate(batches):
            assert batch.tokens.shape == (micro_batch_size, LENGTH)
            for row, window in enumerate(rows([batch])):
                index = (number * data_size + rank) * micro_batch_size + row
                assert batch.loss_mask[row].tolist() == [float(index < len(expected))] * LENGTH
                if index < len(expected):
                    counted.append((index, window))
    assert [window for _, window in sorted(counted)] == expected
    assert len(num_batches) == 1


def test_validation_slices_join_to_the_whole(store: TokenStore) -> None:
    def read(**ranks: int) -> list[Batch]:
        source = store.source("text-validation")
        layout = LoaderLayout(**ranks)
        return list(
            validation_batches(source, sequence_length=LENGTH, num_sequences=5, micro_batch_size=2, layout=layout)
        )

    parts = [read(sequence_rank=rank, sequence_size=4) for rank in range(4)]
    for number, batch in enumerate(read()):
        for field in ("tokens", "labels", "loss_mask", "positions"):
            assert torch.cat([getattr(part[number], field) for part in parts], dim=1).equal(getattr(batch, field))


def test_validation_on_too_little_data_is_refused(store: TokenStore) -> None:
    batches = validation_batches(
        store.source("tiny"), sequence_length=64, num_sequences=1, micro_batch_size=1, layout=LoaderLayout()
    )
    with pytest.raises(UserError, match="source tiny: 41 tokens are fewer than the 65 of one sequence"):
        next(batches)


# ----- loss masks ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masked_store(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: TiktokenTokenizer) -> TokenStore:
    """``copy`` of documents with loss on their second half, and ``plain`` without a mask."""
    path = tmp_path_factory.mktemp("stores") / "masked"
    generator = np.random.default_rng(0)
    with StoreWriter(path, byte_tokenizer, shard_tokens=64, chunk_tokens=8) as writer:
        copy, plain = writer.source("copy", has_loss_mask=True), writer.source("plain")
        for _ in range(40):
            half = generator.integers(0, EOT, generator.integers(0, 14), dtype=np.uint32)
            copy.append(np.tile(half, 2), num_bytes=0, loss_mask=np.repeat([0, 1], len(half)))
            plain.append(half, num_bytes=0)
        writer.finish({})
    return TokenStore(path)


MaskedRow = tuple[list[int], list[int], list[float]]


def joined_rows(store: TokenStore, sequence_size: int, packing: str) -> tuple[list[MaskedRow], list[Location]]:
    """(inputs, labels, mask) of the rows of some steps, the segments of all sequence ranks put together; where from."""
    loaders = [
        make_loader(
            store,
            layout=LoaderLayout(sequence_rank=rank, sequence_size=sequence_size),
            packing=packing,
            sources={"copy": 1.0, "plain": 1.0},
        )
        for rank in range(sequence_size)
    ]
    rows: list[MaskedRow] = []
    locations: list[Location] = []
    for _ in range(3):
        locations += loaders[0].step_after(loaders[0].tokens).locations
        for parts in zip(*(loader.next_step() for loader in loaders), strict=True):
            names = ("tokens", "labels", "loss_mask")
            whole = [torch.cat([getattr(part, name) for part in parts], dim=1) for name in names]
            rows += list(zip(*(tensor.tolist() for tensor in whole), strict=True))
    return rows, locations


@pytest.mark.parametrize("packing", ["concat", "whole"])
def test_the_mask_of_a_source_says_which_labels_count(masked_store: TokenStore, packing: str) -> None:
    """Beside a source without one, in the same micro-batches; and cut over two sequence ranks as on one."""
    rows, locations = joined_rows(masked_store, 1, packing)
    assert joined_rows(masked_store, 2, packing) == (rows, locations)
    source = masked_store.source("copy")
    tokens, mask = source.read(0, source.num_tokens).tolist(), source.loss_mask(0, source.num_tokens).tolist()
    seen: Counter[float] = Counter()
    for (inputs, labels, counted), location in zip(rows, locations, strict=True):
        seen.update(counted)
        start = location.window * LENGTH
        if location.source == "plain":
            assert counted == [1.0] * LENGTH or packing == "whole"
        elif packing == "concat":
            assert inputs == tokens[start : start + LENGTH]
            assert labels == tokens[start + 1 : start + LENGTH + 1]
            assert counted == mask[start + 1 : start + LENGTH + 1]
    assert seen[0.0] > 50
    assert seen[1.0] > 50


@pytest.mark.parametrize("length", [4, 16, 64])
def test_of_whole_documents_every_label_counts_as_often_as_the_mask_says(masked_store: TokenStore, length: int) -> None:
    """One epoch, all windows once: the (input, label) pairs that count are those that a scan of the source finds."""
    source = masked_store.source("copy")
    windows = WholeWindows(source, length)
    rows: list[Row] = [(windows, number) for number in range(windows.num_windows)]
    batch = read_batch(rows, 0, length, buffers=Buffers(), padding_id=EOT)
    counted = batch.loss_mask.bool()
    pairs = Counter(zip(batch.tokens[counted].tolist(), batch.labels[counted].tolist(), strict=True))
    tokens = source.read(0, source.num_tokens).tolist()
    mask = source.loss_mask(0, source.num_tokens).tolist()
    # The end of the last document counts where its last token does.
    labels = zip(tokens, [*tokens[1:], EOT], [*mask[1:], mask[-1]], strict=True)
    expected = Counter((token, label) for token, label, counts in labels if counts)
    assert pairs == expected
    assert 0 < sum(expected.values()) < len(tokens)


def test_joined_windows_are_those_of_concat_with_positions_that_run_on(store: TokenStore) -> None:
    split = LoaderLayout(sequence_rank=1, sequence_size=2)
    for layout, first in ((LoaderLayout(), 0), (split, LENGTH // 2)):
        loaders = [make_loader(store, packing=packing, layout=layout) for packing in ("joined", "concat")]
        pairs = list(zip(*(step_batches(loader, 3) for loader in loaders), strict=True))
        for joined, usual in pairs:
            assert rows([joined]) == rows([usual])
            assert torch.equal(joined.loss_mask, usual.loss_mask)
            here = torch.arange(first, LENGTH).expand(len(joined.tokens), -1)[:, : joined.tokens.size(1)]
            assert torch.equal(joined.positions, here)
        assert not all(torch.equal(joined.positions, usual.positions) for joined, usual in pairs)
        assert loaders[0].fingerprint() != loaders[1].fingerprint()
