"""A program of the twin: captures of PyTorch's own calls, those that CUDA refuses and those that it takes."""

import threading
from collections.abc import Callable

import torch

from cuda_twin.recorded.accesses import Accesses, AccessNotes
from cuda_twin.recorded.ordering import races
from cuda_twin.recorded.records import Recorder

GPU = torch.device("cuda", 0)
Body = Callable[[torch.cuda.Stream], object]
x = torch.ones(64, 64, device=GPU)
weight = torch.ones(64, 64, device=GPU, requires_grad=True)
pageable, pinned = torch.ones(64, 64), torch.ones(64, 64).pin_memory()
before = torch.cuda.Event()
before.record()


def captured(body: Body, mode: str = "thread_local") -> tuple[torch.cuda.CUDAGraph, str]:
    """The graph of a body, and the error of its first call that was refused, or of the end."""
    graph, stream, error = torch.cuda.CUDAGraph(), torch.cuda.Stream(), ""
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode=mode)
        try:
            body(stream)
        except RuntimeError as found:
            error = str(found)
        try:
            graph.capture_end()
        except RuntimeError as found:
            error = error or str(found)
    return graph, error


def forked(stream: torch.cuda.Stream, *, joins: bool = True) -> None:
    other = torch.cuda.Stream()
    other.wait_stream(stream)
    with torch.cuda.stream(other):
        x.add(1)
    if joins:
        stream.wait_stream(other)


def in_thread(work: Callable[[], object]) -> Body:
    def body(stream: torch.cuda.Stream) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        x.add(1)

    return body


TAKEN: dict[str, Body] = {
    "kernels and products": lambda stream: (x @ x).add_(1),
    "a backward pass": lambda stream: (weight @ x).sum().backward(),
    "a copy from pinned memory": lambda stream: pinned.to(GPU, non_blocking=True),
    "memory of the pool": lambda stream: torch.empty(1 << 28, device=GPU).zero_(),
    "a stream that joins and is waited for": forked,
    "a thread that takes memory": in_thread(lambda: torch.empty(1 << 27, device=GPU)),
}
NOT_PERMITTED, UNPINNED = "not permitted when stream is capturing", "unless the CPU tensor is pinned"
REFUSED: dict[str, tuple[Body, str]] = {
    "a number that the host reads": (lambda stream: x.sum().item(), NOT_PERMITTED),
    "a size that the device knows": (lambda stream: x.nonzero(), NOT_PERMITTED),
    "a wait for the stream": (lambda stream: stream.synchronize(), NOT_PERMITTED),
    "a wait for the device": (lambda stream: torch.cuda.synchronize(), NOT_PERMITTED),
    "a wait for an event": (lambda stream: before.synchronize(), NOT_PERMITTED),
    "a copy from pageable memory": (lambda stream: pageable.to(GPU, non_blocking=True), UNPINNED),
    "an event of work outside": (lambda stream: stream.wait_event(before), "uncaptured work"),
    "a stream that is not waited for": (lambda stream: forked(stream, joins=False), "unjoined work"),
}


def check_captures() -> None:
    for name, body in TAKEN.items():
        graph, error = captured(body)
        assert not error, f"{name}: {error}"
        graph.replay()
    for name, (body, expected) in REFUSED.items():
        _, error = captured(body)
        assert expected in error, f"{name}: {error!r}"
        # The device serves others again.
        assert not captured(TAKEN["kernels and products"])[1], name
    pins = in_thread(lambda: torch.ones(1 << 20).pin_memory())
    assert not captured(pins)[1]


def check_races() -> None:
    """A graph on one stream, and an operation on another that reads what the graph writes."""
    recorder, notes = Recorder(), AccessNotes()
    buffer = torch.zeros(64, device=GPU)
    other = torch.cuda.Stream()

    def add_and_fork(stream: torch.cuda.Stream) -> None:
        buffer.add_(1)
        forked(stream)

    with Accesses(notes):
        graph, error = captured(add_and_fork)
        assert not error

        def found() -> list[str]:
            rows, names = recorder.all_rows()
            return [str(race) for race in races(rows, names, notes.places)]

        assert not found(), "a capture does nothing"
        torch.cuda.synchronize()
        graph.replay()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            buffer.mul(2)
        assert not found(), found()
        # Nothing waits for the other stream.
        graph.replay()
        assert any("mul" in race and "add_" in race for race in found()), found()


if __name__ == "__main__":
    check_captures()
    check_races()
