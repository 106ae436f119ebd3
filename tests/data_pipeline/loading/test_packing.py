import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightscale.data_pipeline.loading import packing
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.loading.packing import REGION_WINDOWS, SMALL_SHARE, WholeWindows, pack_region
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.models.layers.context import SequenceContext

EOT = 256
LENGTH = 16
WriteStore = Callable[..., TokenStore]
Window = list[tuple[int, int, int]]


def windows_of(lengths: list[int], capacity: int) -> list[Window]:
    """(document, offset, length) of the ranges of every window."""
    packed = pack_region(np.array(lengths, dtype=np.int64), capacity)
    ranges = list(
        zip(packed.documents.tolist(), packed.offsets.tolist(), packed.lengths.tolist(), strict=True),
    )
    edges = packed.window_starts.tolist()
    assert packed.num_windows == len(edges) - 1
    assert (edges[0], edges[-1]) == (0, len(ranges))
    return [ranges[first:last] for first, last in itertools.pairwise(edges)]


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=80), capacity=st.integers(1, 100))
@settings(max_examples=60)
def test_every_token_is_packed_once_and_documents_stay_whole(lengths: list[int], capacity: int) -> None:
    windows = windows_of(lengths, capacity)
    ranges = sorted(document_range for window in windows for document_range in window)
    for document, length in enumerate(lengths):
        mine = [(offset, size) for number, offset, size in ranges if number == document]
        # Full windows and one rest: a document that fits is in one range.
        assert mine == [(offset, min(capacity, length - offset)) for offset in range(0, length, capacity)]
    assert len(ranges) == sum(-(-length // capacity) for length in lengths)
    for window in windows:
        assert 0 < sum(size for _, _, size in window) <= capacity
        assert window == sorted(window)


def best_fit_decreasing(sizes: list[int], capacity: int) -> list[list[int]]:
    """Plain: every range looks at every window."""
    left: list[int] = []
    held: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        fitting = [(left[window], window) for window in range(len(left)) if left[window] >= sizes[index]]
        if not fitting:
            left.append(capacity)
            held.append([])
            fitting = [(capacity, len(left) - 1)]
        window = min(fitting)[1]
        left[window] -= sizes[index]
        held[window].append(index)
    return [sorted(window) for window in held]


@given(sizes=st.lists(st.integers(7, 99), min_size=1, max_size=60))
@settings(max_examples=40)
def test_long_ranges_are_packed_best_fit_decreasing(sizes: list[int]) -> None:
    assert all(size * SMALL_SHARE > 100 for size in sizes)
    windows = [[document for document, _, _ in window] for window in windows_of(sizes, 100)]
    assert windows == best_fit_decreasing(sizes, 100)


def test_short_ranges_fill_up_in_the_order_of_the_text() -> None:
    # 90 and 80 leave 10 and 20; of 6, 3, 5, 6, 6 the first two fill the 10 up to 9, the rest the 20 up to 17.
    assert [[document for document, _, _ in window] for window in windows_of([6, 90, 3, 80, 5, 6, 6], 100)] == [
        [0, 1, 2],
        [3, 4, 5, 6],
    ]


def test_little_is_padding() -> None:
    """Lengths like those of real texts: a few long documents hold most tokens."""
    lengths = np.random.default_rng(0).lognormal(5, 1.3, 2000).astype(np.int64) + 1
    for capacity in (2048, 8192):
        num_windows = pack_region(lengths, capacity).num_windows
        assert lengths.sum() / (num_windows * capacity) > 0.96
    # First come, first served, for comparison: the next document opens a window where it does not fit.
    opened, left = 0, 0
    for length in np.minimum(lengths, 2048).tolist():
        opened, left = (opened, left - length) if length <= left else (opened + 1, 2048 - length)
    assert pack_region(np.minimum(lengths, 2048), 2048).num_windows < 0.95 * opened


def random_documents(num_documents: int, max_length: int) -> list[list[int]]:
    generator = np.random.default_rng(num_documents)
    return [generator.integers(0, EOT, generator.integers(0, max_length)).tolist() for _ in range(num_documents)]


def make_loader(store: TokenStore, **changes: Any) -> TokenLoader:
    arguments: dict[str, Any] = {"sequence_length": LENGTH, "global_batch_size": 4, "micro_batch_size": 2, "seed": 5}
    return TokenLoader(store, packing="whole", **(arguments | changes))


def documents_of_row(batch: Any, row: int) -> list[tuple[list[int], list[int]]]:
    """(inputs, labels) of every document in a row, cut where positions restart; checks the padding."""
    tokens, labels, positions = (getattr(batch, name)[row].tolist() for name in ("tokens", "labels", "positions"))
    counted = batch.loss_mask[row].tolist()
    starts = [slot for slot, position in enumerate(positions) if position == 0]
    found = []
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        assert positions[start:stop] == list(range(stop - start))
        assert len(set(counted[start:stop])) == 1
        if counted[start]:
            found.append((tokens[start:stop], labels[start:stop]))
        else:
            assert stop == len(tokens), "padding comes last"
            assert set(tokens[start:]) == set(labels[start:]) == {EOT}
    return found


@pytest.mark.parametrize("max_length", [6, 40, 300])
def test_an_epoch_has_every_document_once(write_store: WriteStore, max_length: int) -> None:
    """Enough documents for several groups; the longest are longer than all windows of a group together."""
    texts = random_documents(6 * REGION_WINDOWS * LENGTH // max_length, max_length)
    if max_length == 300:
        texts[3] = [7] * (REGION_WINDOWS * LENGTH * 2 + 3)
    loader = make_loader(write_store({"a": texts}), global_batch_size=1, micro_batch_size=1)
    (_, windows), *_ = ((here, here.windows["a"]) for here in loader._stages)
    assert isinstance(windows, WholeWindows)
    assert windows.num_windows > 3 * REGION_WINDOWS
    wanted: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for ids in texts:
        tokens = [EOT, *ids, EOT]  # the next document's first token is the last label, also at the end of the source
        for start in range(0, len(ids) + 1, LENGTH):
            stop = min(start + LENGTH, len(ids) + 1)
            wanted[tuple(tokens[start:stop]), tuple(tokens[start + 1 : stop + 1])] += 1
    got: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for _ in range(windows.num_windows):
        (batch,) = loader.next_step()
        got.update((tuple(tokens), tuple(labels)) for tokens, labels in documents_of_row(batch, 0))
    assert got == wanted
    (batch,) = loader.next_step()
    assert loader.step_after(loader.tokens).locations[0].epoch == 1


def test_padding_is_a_document_of_its_own_for_the_mixers(write_store: WriteStore) -> None:
    loader = make_loader(write_store({"a": [[1] * 9, [2] * 12]}), global_batch_size=2)
    (batch,) = loader.next_step()
    rows = sorted(range(2), key=lambda row: int(batch.loss_mask[row].sum()))
    assert [int(batch.loss_mask[row].sum()) for row in rows] == [10, 13]
    context = SequenceContext.of(batch.positions[rows])
    assert context.cu_seqlens is not None
    assert context.cu_seqlens.tolist() == [0, 10, 16, 29, 32]


@pytest.mark.parametrize("sequence_size", [2, 4, 16])
def test_sequence_slices_join_to_the_whole(write_store: WriteStore, sequence_size: int) -> None:
    store = write_store({"a": random_documents(60, 12), "b": random_documents(9, 70)})
    whole = make_loader(store)
    parts = [
        make_loader(store, layout=LoaderLayout(sequence_rank=rank, sequence_size=sequence_size))
        for rank in range(sequence_size)
    ]
    for _ in range(6):
        expected = whole.next_step()
        got = [loader.next_step() for loader in parts]
        for number, batch in enumerate(expected):
            for field in ("tokens", "labels", "loss_mask", "positions"):
                assert torch.cat([getattr(one[number], field) for one in got], dim=1).equal(getattr(batch, field))


def test_the_index_is_the_same_by_any_blocks_and_kept(
    write_store: WriteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_store({"a": [*random_documents(700, 30), [1] * 5000, *random_documents(40, 90)]}).source("a")
    whole = WholeWindows(source, LENGTH, index_dir=tmp_path / "index")
    (file,) = (tmp_path / "index").iterdir()
    for block in (1, 7, 64, 741):
        monkeypatch.setattr(packing, "_DOCUMENTS_AT_ONCE", block)
        assert WholeWindows(source, LENGTH)._first_window.tolist() == whole._first_window.tolist()

    def fail(*_: Any) -> None:
        raise AssertionError("made anew")

    content = file.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(WholeWindows, "_make_index", fail)
        assert WholeWindows(source, LENGTH, index_dir=tmp_path / "index").num_windows == whole.num_windows
        with pytest.raises(AssertionError, match="made anew"):
            WholeWindows(source, 2 * LENGTH, index_dir=tmp_path / "index")
    file.write_bytes(content[:100])  # cut short: made anew
    assert WholeWindows(source, LENGTH, index_dir=tmp_path / "index").num_windows == whole.num_windows
    assert file.read_bytes() == content


def test_another_packing_is_another_run(write_store: WriteStore) -> None:
    store = write_store({"a": random_documents(60, 12)})
    state = make_loader(store).state_dict()
    concat = TokenLoader(store, sequence_length=LENGTH, global_batch_size=4, micro_batch_size=2, seed=5)
    with pytest.raises(Exception, match="packing: whole 1 before, concat now"):
        concat.load_state_dict(state)
