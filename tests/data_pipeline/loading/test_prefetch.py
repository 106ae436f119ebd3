import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lightscale.data_pipeline.loading.loader import TokenLoader
from lightscale.data_pipeline.loading.prefetch import Prefetcher
from lightscale.data_pipeline.loading.windows import Batch
from lightscale.data_pipeline.store.token_store import TokenSource, TokenStore

WriteStore = Callable[..., TokenStore]


@pytest.fixture
def loader(write_store: WriteStore) -> TokenLoader:
    generator = np.random.default_rng(0)
    store = write_store({"a": [generator.integers(0, 256, 50).tolist() for _ in range(20)]})
    return TokenLoader(store, sequence_length=16, global_batch_size=4, micro_batch_size=2)


def tokens_of(batches: list[Batch]) -> list[Any]:
    return [batch.tokens.tolist() for batch in batches]


def test_the_steps_and_the_state_are_those_of_the_loader(loader: TokenLoader) -> None:
    wanted = [tokens_of(loader.batches_after(step * 64)) for step in range(30)]
    with Prefetcher(loader, depth=3) as ahead:
        for step in range(30):
            assert loader.state_dict()["tokens"] == loader.tokens == step * 64
            assert tokens_of(ahead.next_step()) == wanted[step]


def test_batches_held_are_not_written_to_again(loader: TokenLoader) -> None:
    """Memory is used again only when nobody holds it, in whatever order it is let go."""
    with Prefetcher(loader) as ahead:
        held: list[tuple[int, list[Batch]]] = []
        for step in range(30):
            held.append((step, ahead.next_step()))
            if step % 3:
                held.pop(step % len(held))
    assert len(held) > 5
    fresh = TokenLoader(loader.store, sequence_length=16, global_batch_size=4, micro_batch_size=2)
    for step, batches in held:
        for got, wanted in zip(batches, fresh.batches_after(step * 64), strict=True):
            for name in ("tokens", "labels", "positions", "loss_mask"):
                assert getattr(got, name).equal(getattr(wanted, name))


def test_it_reads_at_most_depth_steps_ahead(loader: TokenLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    read = loader.batches_after
    asked: list[int] = []
    monkeypatch.setattr(loader, "batches_after", lambda tokens: (asked.append(tokens), read(tokens))[1])
    with Prefetcher(loader, depth=2) as ahead:
        for step in range(1, 6):
            ahead.next_step()
            assert max(asked) <= (step + 1) * 64
    assert asked == sorted(set(asked))


def test_memory_is_pinned_before_the_first_step(loader: TokenLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as is held at any later moment, however late steps are read: none is taken in the middle of a run."""
    depth, per_step = 2, len(loader.batches_after(0))
    held, most = [0], [0]

    def let_go() -> None:
        held[0] -= 1

    def pinned(batch: Batch) -> Batch:
        made = replace(batch)
        held[0] += 1
        most[0] = max(most[0], held[0])
        weakref.finalize(made, let_go)
        return made

    monkeypatch.setattr(Batch, "pinned", pinned)
    monkeypatch.setattr(Prefetcher, "_take_device", lambda _: None)
    read, begin = loader.batches_after, threading.Event()
    # Steps behind the first one are read when that has ended.
    monkeypatch.setattr(loader, "batches_after", lambda tokens: (tokens and begin.wait(60), read(tokens))[1])
    with Prefetcher(loader, depth=depth, device=torch.device("cuda")) as ahead:
        ahead.next_step()
        assert most[0] == (depth + 1) * per_step
        begin.set()
        for _ in range(20):
            ahead.next_step()
    assert most[0] == (depth + 1) * per_step


def test_another_position_drops_what_was_read(loader: TokenLoader) -> None:
    wanted = {tokens: tokens_of(loader.batches_after(tokens)) for tokens in range(0, 64 * 12, 64)}
    with Prefetcher(loader) as ahead:
        states = []
        for _ in range(3):
            states.append(loader.state_dict())
            ahead.next_step()
        loader.load_state_dict(states[1])
        assert tokens_of(ahead.next_step()) == wanted[64]
        loader.skip(2 * 64, 5 * 64)
        assert tokens_of(ahead.next_step()) == wanted[7 * 64]
        assert tokens_of(ahead.next_step()) == wanted[8 * 64]


def test_an_error_comes_in_its_turn_with_the_traceback_of_the_thread(
    loader: TokenLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failing = loader.batches_after, [True]

    def sometimes(tokens: int) -> list[Batch]:
        if tokens == 128 and failing[0]:
            raise OSError("the disk is gone")
        return read(tokens)

    monkeypatch.setattr(loader, "batches_after", sometimes)
    with Prefetcher(loader, depth=4) as ahead:
        ahead.next_step()
        ahead.next_step()
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone") as error:
                ahead.next_step()
            assert "sometimes" in "".join(traceback.format_tb(error.value.__traceback__))
            assert loader.tokens == 128
        failing[0] = False
        assert tokens_of(ahead.next_step()) == tokens_of(read(128))


def test_leaving_ends_the_thread(loader: TokenLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]

    slow = threading.Event()
    read = TokenSource.read
    monkeypatch.setattr(TokenSource, "read", lambda *args: (slow.wait(0.01), read(*args))[1])
    with Prefetcher(loader, depth=50) as ahead:
        ahead.next_step()
        assert names()
    assert not names()
    with pytest.raises(ValueError, match="depth 0"):
        Prefetcher(loader, depth=0)
