"""What a fault destroys of a record is kept."""

from pathlib import Path

from lightscale.launch.chaos.harness.history import History
from lightscale.launch.chaos.harness.training import Tail
from lightscale.runs.run_directory import LineWriter


def write(path: Path, first: int, last: int) -> None:
    with LineWriter(path) as writer:
        for step in range(first, last + 1):
            writer.write({"step": step, "attempt": 1})


def test_lines_that_were_destroyed_are_still_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history, tail = History(path), Tail(path)
    write(path, 1, 4)
    tail.update()
    for first, destroyed in ((5, 1), (7, 0)):
        with history.damaged():
            lines = path.read_bytes().split(b"\n")
            lines[destroyed] = bytes(50)
            # The last one is cut too: it ends when the next one is written.
            path.write_bytes(b"\n".join([b"[1]", *lines[:-1], b'{"step": 9']))
        assert [line["step"] for line in history.lines()] == list(range(1, first))
        tail.go_to_end()
        write(path, first, first + 1)
        assert [line["step"] for line in history.lines()] == list(range(1, first + 2))
        tail.update()
        assert (tail.step, tail.num_lines) == (first + 1, first + 1)


def test_a_record_that_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history, tail = History(path), Tail(path)
    write(path, 1, 3)
    with history.damaged():
        path.unlink()
        path.mkdir()
    tail.go_to_end()
    assert [line["step"] for line in history.lines()] == [1, 2, 3]
    path.rmdir()
    write(path, 4, 4)
    tail.update()
    assert [line["step"] for line in history.lines()] == [1, 2, 3, 4]
    assert tail.num_lines == 1
