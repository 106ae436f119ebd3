"""Boxes of whole tensors, by their elements one by one."""

import itertools
import math

import pytest
import torch

from lightscale.parallel.shards import Box, TensorShard, copy_overlap, fault_of_cover, range_boxes

SHAPES = [(), (1,), (5,), (1, 1), (3, 4), (4, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 2)]


def indices(offset: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """Those of a box's elements in the flattened tensor, in the order of the box."""
    every = itertools.product(*(range(start, start + size) for start, size in zip(offset, sizes, strict=True)))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return [sum(at * stride for at, stride in zip(element, strides, strict=True)) for element in every]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_boxes_of_a_range_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    """Of every range, those that end within a row by one element among them."""
    count = math.prod(shape)
    for first in range(count + 1):
        for last in range(first, count + 1):
            boxes = list(range_boxes(shape, first, last))
            found = [index for offset, sizes in boxes for index in indices(offset, sizes, shape)]
            assert found == list(range(first, last)), (first, last)
            assert len(boxes) <= max(1, 2 * len(shape) - 1), (first, last)


def cut(whole: torch.Tensor, offset: tuple[int, ...], sizes: tuple[int, ...]) -> TensorShard:
    slices = tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))
    box = Box(key="w", shape=tuple(whole.shape), offset=offset, sizes=sizes)
    return TensorShard(box=box, data=whole[slices].clone())


def test_an_overlap_is_copied_to_its_place_and_counted() -> None:
    """Of every two boxes of a matrix."""
    whole = torch.arange(6.0).view(2, 3)
    shape = tuple(whole.shape)
    ranges = [[(start, stop - start) for start, stop in itertools.combinations(range(n + 1), 2)] for n in shape]
    boxes = [tuple(zip(*pair, strict=True)) for pair in itertools.product(*ranges)]
    for source, target in itertools.product(boxes, repeat=2):
        taken, there = cut(whole, *source), cut(torch.full_like(whole, -1.0), *target)
        common = set(indices(*source, shape)) & set(indices(*target, shape))
        assert copy_overlap(taken, there) == len(common), (source, target)
        expected = [float(index) if index in common else -1.0 for index in indices(*target, shape)]
        assert there.data.flatten().tolist() == expected, (source, target)


def test_a_cover_holds_each_element_once() -> None:
    def box(offset: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
        return Box(key="w", shape=(3, 4), offset=offset, sizes=sizes)

    for first in range(13):
        halves = [*range_boxes((3, 4), 0, first), *range_boxes((3, 4), first, 12)]
        assert fault_of_cover(box(*one) for one in halves) is None
    assert fault_of_cover([box((0, 0), (3, 3))]) == "w of (3, 4) has 12 elements, and the ranks hold 9"
    # As many elements as there are, one of them twice.
    twice = [box((0, 0), (2, 4)), box((1, 3), (2, 1)), box((2, 0), (1, 2))]
    assert fault_of_cover(twice) == "w is stored 2 times at (1, 3)"
