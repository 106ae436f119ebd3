"""Tensors put together from boxes of several ranks and taken apart again; ranks are threads here."""

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.parallel.matrices import exchange
from lightscale.parallel.matrices.sharing import shared_out
from lightscale.parallel.shards import Box

WHOLE = {"wide": torch.arange(48.0).view(6, 8), "small": torch.arange(20.0).view(4, 5)}


def box(key: str, offset: tuple[int, int], sizes: tuple[int, int]) -> Box:
    return Box(key=key, shape=tuple(WHOLE[key].shape), offset=offset, sizes=sizes)


BOXES = [
    [(box("wide", (0, 0), (3, 8)), False), (box("small", (0, 0), (4, 5)), False)],
    # A copy is not sent, and gets the results.
    [(box("wide", (3, 0), (3, 3)), False), (box("small", (0, 0), (4, 5)), True)],
    [(box("wide", (3, 3), (3, 5)), False)],
    # A rank without a part may still compute.
    [],
]


class Ranks:
    """``torch.distributed`` of four threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(len(BOXES), timeout=20)
        self.sent: dict[int, tuple[Tensor, ...]] = {}
        self.elements = [0] * len(BOXES)

    def all_gather_object(self, found: list[Any], own: Any, group: Any) -> None:
        found[:] = BOXES

    def all_to_all_single(
        self, received: Tensor, packed: Tensor, sizes: list[int], counts: list[int], group: Any
    ) -> None:
        me = group.rank()
        self.sent[me] = packed.split(counts)
        self.elements[me] += sum(count for to, count in enumerate(counts) if to != me)
        self.barrier.wait()
        parts = [self.sent[source][me] for source in range(len(BOXES))]
        assert [part.numel() for part in parts] == sizes
        received.copy_(torch.cat(parts))
        self.barrier.wait()


def cut(one: Box, whole: Tensor) -> Tensor:
    rows, columns = (slice(first, first + size) for first, size in zip(one.offset, one.sizes, strict=True))
    return whole[rows, columns].reshape(-1)


def test_every_rank_gets_the_results_for_its_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, computed, right = Ranks(), [], dict[int, bool]()
    monkeypatch.setattr(exchange, "dist", ranks)

    def function(key: str, tensor: Tensor) -> Tensor:
        assert torch.equal(tensor, WHOLE[key])
        computed.append(key)
        return tensor.flip(0)

    def work(rank: int) -> None:
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: len(BOXES))
        one = exchange.MatrixExchange(
            BOXES[rank], group, lambda _, shape: math.prod(shape), dtype=torch.float32, device=torch.device("cpu")
        )
        own = [box for box, _ in BOXES[rank]]
        found = one.compute([cut(box, WHOLE[box.key]) for box in own], function)
        expected = [cut(box, WHOLE[box.key].flip(0)) for box in own]
        right[rank] = len(found) == len(own) and all(map(torch.equal, found, expected))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(BOXES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == dict.fromkeys(range(len(BOXES)), True)
    assert sorted(computed) == ["small", "wide"], "each on one rank"
    # "wide" is computed on rank 0 and "small" on rank 1: what others own of each goes there and comes back.
    assert ranks.elements == [20 + 9 + 15, 9 + 20, 15, 0]


def test_ranks_share_out_the_operations() -> None:
    found = shared_out({"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": 0.0}, 2)
    assert found == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0}
    assert shared_out({"a": 1.0}, 3) == {"a": 0}
