import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightscale.data_pipeline.loader import Batch, Layout, TokenLoader, validation_batches
from lightscale.data_pipeline.store import StoreWriter, TokenStore
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


def rows(batches: Sequence[Batch]) -> list[list[int]]:
    """Every row as its inputs and last label."""
    return [
        [*tokens, labels[-1]]
        for batch in batches
        for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
    ]


def test_a_sample_is_a_window_of_its_source(store: TokenStore) -> None:
    loader = make_loader(store)
    for index in range(60):
        location, window = loader.locate(index), loader.sample(index)
        expected = windows_of(location.source)[location.window]
        assert window.tokens.tolist() == expected
        assert window.positions.tolist() == positions_of(expected[:-1])
        assert location.start == location.window * LENGTH


def test_positions_restart_at_documents_and_at_the_window(store: TokenStore) -> None:
    for length in (1, 3, 16, 50, 64):
        loader = make_loader(store, sequence_length=length, sources={"code": 1, "text": 1})
        for index in range(30):
            window = loader.sample(index)
            assert window.positions.tolist() == positions_of(window.tokens[:-1].tolist())
            starts = [i for i, token in enumerate(window.tokens[:-1]) if token == EOT or i == 0]
            assert np.flatnonzero(window.positions == 0).tolist() == starts


def test_a_batch_is_its_samples(store: TokenStore) -> None:
    loader = make_loader(store)
    batches = loader.micro_batches(3)
    assert len(batches) == 6
    for number, batch in enumerate(batches):
        for row in range(2):
            window = loader.sample(3 * 12 + number * 2 + row)
            assert batch.tokens[row].tolist() == window.tokens[:-1].tolist()
            assert batch.labels[row].tolist() == window.tokens[1:].tolist()
            assert batch.positions[row].tolist() == window.positions.tolist()
        assert {batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype} == {torch.int64}
        assert batch.loss_mask.dtype == torch.float32
        assert batch.loss_mask.equal(torch.ones(2, LENGTH))
        for tensor in (batch.tokens, batch.labels, batch.loss_mask, batch.positions):
            assert tensor.shape == (2, LENGTH)
            assert tensor.is_contiguous()


def test_every_epoch_of_a_source_has_each_window_once_in_another_order(store: TokenStore) -> None:
    loader = make_loader(store, sources={"code": 2, "text": 1})
    seen: dict[tuple[str, int], list[int]] = {}
    for index in range(400):
        location = loader.locate(index)
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
    by_tokens = Counter(loader.locate(index).source for index in range(1000))
    assert set(by_tokens) == {"code", "text", "tiny"}
    total = sum(len(stream(name)) for name in by_tokens)
    assert all(abs(by_tokens[name] - 1000 * len(stream(name)) / total) <= 1.01 for name in by_tokens)
    weighted = make_loader(store, sources={"text": 3, "code": 1})
    assert Counter(weighted.locate(index).source for index in range(1000)) == {"text": 750, "code": 250}


def test_the_order_does_not_depend_on_the_length_of_the_run_or_the_batch(store: TokenStore) -> None:
    small = make_loader(store, global_batch_size=3, micro_batch_size=1)
    large = make_loader(store, global_batch_size=24, micro_batch_size=8)
    assert rows([batch for step in range(16) for batch in small.micro_batches(step)]) == rows(
        [batch for step in range(2) for batch in large.micro_batches(step)]
    )
    other_seed = make_loader(store, seed=6)
    assert rows(make_loader(store).micro_batches(0)) != rows(other_seed.micro_batches(0))


@pytest.mark.parametrize(
    ("data_size", "micro_batch_size"), [(1, 1), (1, 12), (2, 1), (2, 3), (3, 2), (3, 4), (4, 3), (6, 2), (12, 1)]
)
def test_data_ranks_share_the_global_batch_out(store: TokenStore, data_size: int, micro_batch_size: int) -> None:
    whole = rows(make_loader(store, micro_batch_size=12).micro_batches(2))
    num_micro_batches = 12 // (data_size * micro_batch_size)
    parts = []
    for rank in range(data_size):
        layout = Layout(data_rank=rank, data_size=data_size)
        batches = make_loader(store, micro_batch_size=micro_batch_size, layout=layout).micro_batches(2)
        assert len(batches) == num_micro_batches
        parts.append([rows([batch]) for batch in batches])
    in_order = [row for number in range(num_micro_batches) for part in parts for row in part[number]]
    assert in_order == whole


@pytest.mark.parametrize("sequence_size", [2, 4, 8, 16])
def test_sequence_slices_join_to_the_whole(store: TokenStore, sequence_size: int) -> None:
    for data_rank in range(2):
        whole = make_loader(store, layout=Layout(data_rank=data_rank, data_size=2))
        slices = [
            make_loader(
                store,
                layout=Layout(data_rank=data_rank, data_size=2, sequence_rank=rank, sequence_size=sequence_size),
            )
            for rank in range(sequence_size)
        ]
        for step in range(6):
            expected = whole.micro_batches(step)
            parts = [loader.micro_batches(step) for loader in slices]
            for number, batch in enumerate(expected):
                for field in ("tokens", "labels", "loss_mask", "positions"):
                    joined = torch.cat([getattr(part[number], field) for part in parts], dim=1)
                    assert joined.equal(getattr(batch, field)), field


@given(
    num_steps=st.integers(0, 40),
    data_size=st.sampled_from([1, 2, 3]),
    micro_batch_size=st.sampled_from([1, 2]),
    global_batch_size=st.sampled_from([12, 24]),
)
@settings(max_examples=25)
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
            layout=Layout(data_rank=rank, data_size=data_size),
        )
        for rank in range(data_size)
    ]
    for loader in second:
        loader.load_state_dict(state)
    got = Counter(tuple(row) for loader in second for row in rows(loader.next_step()))
    reference = make_loader(store)
    wanted = range(num_steps * 12, num_steps * 12 + global_batch_size)
    assert got == Counter(tuple(reference.sample(index).tokens.tolist()) for index in wanted)
    assert {loader.tokens for loader in second} == {state["tokens"] + global_batch_size * LENGTH}


def test_next_step_goes_through_the_steps(store: TokenStore) -> None:
    loader = make_loader(store)
    for step in range(5):
        assert rows(loader.next_step()) == rows(make_loader(store).micro_batches(step))


def test_state_survives_json_and_is_equal_on_every_rank(store: TokenStore) -> None:
    states = []
    for rank in range(2):
        loader = make_loader(store, layout=Layout(data_rank=rank, data_size=2))
        loader.next_step()
        states.append(loader.state_dict())
    assert states[0] == states[1] == json.loads(json.dumps(states[0]))


def test_other_data_is_refused_by_what_differs(store: TokenStore, write_store: WriteStore) -> None:
    state = make_loader(store).state_dict()
    changes: dict[str, TokenLoader] = {
        "seed: 5 then, 6 now": make_loader(store, seed=6),
        "sequence_length: 16 then, 8 now": make_loader(store, sequence_length=8),
        "source tiny: .* then, None now": make_loader(store, sources={"code": 1, "text": 1}),
        "weight of code: .* then, 1/3 now": make_loader(store, sources={"code": 1, "text": 1, "tiny": 1}),
        "source code: .* then, .* now": make_loader(
            write_store({**DOCUMENTS, "code": [*DOCUMENTS["code"][:-1], [1, 2, 3]]})
        ),
        "store: .* then, .* now": make_loader(write_store({**DOCUMENTS, "text-validation": [[1]]}, "other")),
    }
    for message, loader in changes.items():
        with pytest.raises(UserError, match=rf"the data is not what this run was trained on \(.*{message}"):
            loader.load_state_dict(state)
        assert loader.tokens == 0
    same = make_loader(write_store(DOCUMENTS, "same"))
    same.load_state_dict(state)


@pytest.mark.parametrize("tokens", [-16, 8, 17])
def test_a_counter_between_samples_is_refused(store: TokenStore, tokens: int) -> None:
    loader = make_loader(store)
    with pytest.raises(UserError, match="no multiple of sequence_length 16"):
        loader.load_state_dict(loader.state_dict() | {"tokens": tokens})


@pytest.mark.parametrize("num_extra", [0, 1, 15, 16])
def test_what_is_left_at_the_end_of_a_source_is_counted(write_store: WriteStore, num_extra: int) -> None:
    num_tokens = 2 * LENGTH + 1 + num_extra  # end of text included
    loader = make_loader(write_store({"a": [[3] * (num_tokens - 1)]}))
    num_windows, left = (3, 0) if num_extra == 16 else (2, num_extra)
    assert {loader.locate(index).window for index in range(12)} == set(range(num_windows))
    assert loader.description() == [
        f"a: {num_windows} sequences of 16 tokens, 100.00% of the samples, {left} tokens at its end left out"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 1000}, r"source \w+: \d+ tokens make no sequence of sequence_length 1000; 1001 are"),
        ({"global_batch_size": 7}, r"global_batch_size 7 cannot be divided by micro_batch_size 2 × 1 data ranks \(2\)"),
        ({"layout": Layout(data_size=5)}, r"global_batch_size 12 cannot be divided by .* × 5 data ranks \(10\)"),
        ({"micro_batch_size": 0}, "micro_batch_size 0"),
        ({"layout": Layout(sequence_size=3)}, r"sequence_length 16 cannot be divided by .* sequence ranks \(3\)"),
        ({"sources": {"prose": 1.0}}, "no source 'prose'; it has code, text, text-validation, tiny"),
        ({"sources": {"text-validation": 1.0}}, "text-validation holds validation data, which is never trained on"),
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
        Layout(**changes)


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
                layout=Layout(data_rank=rank, data_size=data_size),
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
    def read(**layout: int) -> list[Batch]:
        source = store.source("text-validation")
        place = Layout(**layout)
        return list(
            validation_batches(source, sequence_length=LENGTH, num_sequences=5, micro_batch_size=2, layout=place)
        )

    parts = [read(sequence_rank=rank, sequence_size=4) for rank in range(4)]
    for number, batch in enumerate(read()):
        for field in ("tokens", "labels", "loss_mask", "positions"):
            assert torch.cat([getattr(part[number], field) for part in parts], dim=1).equal(getattr(batch, field))


def test_validation_on_too_little_data_is_refused(store: TokenStore) -> None:
    batches = validation_batches(
        store.source("tiny"), sequence_length=64, num_sequences=1, micro_batch_size=1, layout=Layout()
    )
    with pytest.raises(UserError, match="source tiny: 41 tokens make no sequence of sequence_length 64; 65 are needed"):
        next(batches)
