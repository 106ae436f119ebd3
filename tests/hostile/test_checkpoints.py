"""Checkpoints with files that are none, of huge sizes, or damaged at random: refused by name, or read as others do.

Values changed one by one are in ``test_crafted_checkpoints.py``.
"""

import copy
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightscale.training.checkpoints.directories import Contents, directory_name, list_checkpoints, remove
from lightscale.training.checkpoints.manifest import NAME, read_manifest
from lightscale.training.checkpoints.reader import read_headers, verify
from lightscale.training.checkpoints.reading import DamagedCheckpoint

pytestmark = pytest.mark.timeout(300)

crafted = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "crafted_checkpoints.py")))
Victim, Loaded = crafted.Victim, crafted.Loaded
framed, outcome, read = crafted.framed, crafted.outcome, crafted.read
STEP, TENSORS, JSON, MOST_S = crafted.STEP, crafted.TENSORS, crafted.JSON, crafted.MOST_S


@pytest.fixture(scope="module")
def original(victims: dict[Contents, Victim]) -> Loaded:
    return read(victims["full"].path)


def test_what_was_written_is_read(victim: Victim, alone: Victim) -> None:
    for one in (victim, alone):
        assert outcome(one) is None
        one.seal()
        assert outcome(one) is None


# --- What is no file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [NAME, "state.json", "rank-00001.json", TENSORS[0]])
@pytest.mark.parametrize("what", ["named pipe", "link to a device", "link to itself", "link to a file", "directory"])
def test_a_name_that_is_no_file(victim: Victim, tmp_path: Path, name: str, what: str) -> None:
    path = victim.path / name
    path.unlink()
    if what == "named pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        (tmp_path / name).write_bytes(victim.content[name])
        path.symlink_to({"link to a device": Path("/dev/zero"), "link to itself": path}.get(what, tmp_path / name))
    message = outcome(victim)
    assert message is not None and str(path) in message
    # The files of tensors are read by name again later.
    if name in TENSORS:
        with pytest.raises(DamagedCheckpoint, match=name):
            read_headers(victim.path, read_manifest(victim.path))


def test_a_file_more_and_one_that_has_gone(victim: Victim) -> None:
    (victim.path / "notes\x1b[31m").touch()
    assert "notes" in (outcome(victim) or "")
    victim.repair()
    (victim.path / "state.json").unlink()
    assert "state.json: expected" in (outcome(victim) or "")


def test_a_link_is_no_checkpoint_and_is_never_followed(victims: dict[Contents, Victim], tmp_path: Path) -> None:
    """Renamed, removed and overwritten is the link itself; nothing of it is left behind."""
    target = tmp_path / "elsewhere" / directory_name(STEP)
    shutil.copytree(victims["full"].path, target)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    link, broken = checkpoints / directory_name(STEP), checkpoints / directory_name(STEP + 1)
    link.symlink_to(target)
    broken.symlink_to(tmp_path / "nothing")
    assert [name.step for name in list_checkpoints(checkpoints)] == [STEP, STEP + 1]
    for path, step in ((link, STEP), (broken, STEP + 1)):
        with pytest.raises(DamagedCheckpoint, match=f"{path.name}: a symbolic link; use a real directory"):
            verify(path, step)
    remove(checkpoints, [STEP, STEP + 1])
    assert list(checkpoints.iterdir()) == []
    assert {file.name: file.read_bytes() for file in target.iterdir()} == victims["full"].content


# --- Sizes --------------------------------------------------------------------------------------------------------

CHILD = """
import resource, sys, time
from pathlib import Path
from lightscale.cli import main
from lightscale.config.files import to_toml
from lightscale.errors import UserError
from lightscale.training.checkpoints.reader import verify
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[2:]:
    began = time.monotonic()
    try:
        verify(Path(path), int(Path(path).name.removeprefix("step-")))
        print("accepted")
    except UserError as error:
        print(round(time.monotonic() - began, 1), str(error)[:200])
"""


def test_what_claims_to_be_huge_takes_no_memory(victims: dict[Contents, Victim], tmp_path: Path) -> None:
    """In a process that may have 192 MiB more than when it began; the files really have 7 MB."""

    def case(name: str) -> Victim:
        return Victim(Path(shutil.copytree(victims["full"].path, tmp_path / name / directory_name(STEP))))

    cases = {name: case(name) for name in ("manifest", "state", "random", "length", "values", "boxes")}
    body = json.loads(victims["full"].content[NAME])
    for name, file in (("manifest", NAME), ("state", "state.json"), ("random", JSON[1])):
        # Sparse: a file of a terabyte that takes no disk.
        os.truncate(cases[name].path / file, 1 << 40)
        if file != NAME:
            changed = copy.deepcopy(body)
            changed["files"][file]["bytes"] = 1 << 40
            cases[name].seal_manifest(changed)
    cases["length"].write(TENSORS[0], (1 << 60).to_bytes(8, "little") + bytes(1000))
    # Boxes of one row: compared pair by pair they would take hours.
    num_boxes = 40_000
    header: dict[str, Any] = {"__metadata__": {"shapes": json.dumps({"model.a": [1, num_boxes]})}}
    for at in range(num_boxes):
        header[f"model.a@0,{at}"] = {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * at, 4 * at + 4]}
    cases["boxes"].write(TENSORS[0], framed(header, bytes(4 * num_boxes)))
    # Each of 3 bytes, and 64 in memory.
    cases["values"].write("state.json", b'{"step": 20, "a": [' + b"[]," * 2_000_000 + b"1]}")
    for name in ("length", "values", "boxes"):
        cases[name].seal()
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(192 << 20), *(str(victim.path) for victim in cases.values())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = child.stdout.splitlines()
    assert child.returncode == 0 and len(lines) == len(cases), child.stderr
    for (name, victim), line in zip(cases.items(), lines, strict=True):
        assert str(victim.path) in line, (name, line)
        assert float(line.split()[0]) < MOST_S
    expected = (
        "at most",
        "at most",
        "at most",
        "a header of 1152921504606846976 bytes",
        "state.json",
        "the ranks hold 12",
    )
    for line, words in zip(lines, expected, strict=True):
        assert words in line


# --- At random ----------------------------------------------------------------------------------------------------

WEIRD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 700),
    st.sampled_from(
        [1 << 31, 1 << 32, 1 << 62, 1 << 64, 10**40, 10**400, -(10**40), float("nan"), float("inf"), 1e308]
    ),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.sampled_from(["", "../state.json", "/dev/zero", "0" * 5000, "\x00", "\ud800", "F32", "model.a@0", "[/b]"]),
    st.lists(st.integers(-1, 9), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.integers(1, 60).map(lambda depth: json.loads("[" * depth + "]" * depth)),
)


def places(value: Any, trail: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value in it; of long lists a few."""
    if trail:
        yield trail
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*trail, key))
    elif isinstance(value, list):
        for at in sorted({*range(min(len(value), 3)), len(value) - 1} - {-1}):
            yield from places(value[at], (*trail, at))


def at(value: Any, trail: tuple[Any, ...]) -> Any:
    for key in trail:
        value = value[key]
    return value


def mutate_json(data: st.DataObject, value: Any) -> Any:
    """Change one to three things of a JSON value; text where JSON's own writer would not write it."""
    for _ in range(data.draw(st.integers(1, 3))):
        every = sorted(places(value), key=repr)
        if not every:
            break
        trail = data.draw(st.sampled_from(every))
        holder, key = at(value, trail[:-1]), trail[-1]
        match data.draw(st.sampled_from(["set", "set", "remove", "rename", "swap", "add", "nudge", "twice"])):
            case "set":
                holder[key] = data.draw(WEIRD)
            case "remove":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                others = [*holder, f"{key}x", data.draw(st.text(max_size=5))]
                holder[data.draw(st.sampled_from(others))] = holder.pop(key)
            case "swap":
                other = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
                holder[key], holder[other] = holder[other], holder[key]
            case "add" if isinstance(holder, dict):
                holder[data.draw(st.text(max_size=5))] = copy.deepcopy(holder[key])
            case "add":
                holder.insert(key, copy.deepcopy(holder[key]))
            case "nudge" if isinstance(holder[key], int | float):
                nudges = [-1, 1, 4, 256]
                # An integer of many digits has no half.
                nudges = [*nudges, 0.5] if abs(holder[key]) < 2**53 else nudges
                holder[key] += data.draw(st.sampled_from(nudges))
            case "twice" if isinstance(holder, dict) and holder is value:
                return json.dumps(value)[:-1] + f", {json.dumps(key)}: {json.dumps(value[key])}}}"
    return value


def mutate_bytes(data: st.DataObject, content: bytes) -> bytes:
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    match data.draw(st.sampled_from(["flip", "flip", "cut", "remove", "twice", "zero", "more", "insert"])):
        case "flip" if content:
            position = min(first, len(content) - 1)
            bit = 1 << data.draw(st.integers(0, 7))
            return content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :]
        case "cut":
            return content[:first]
        case "remove":
            return content[:first] + content[last:]
        case "twice":
            return content[:last] + content[first:]
        case "zero":
            return content[:first] + bytes(last - first) + content[last:]
        case "more":
            return content + data.draw(st.binary(min_size=1, max_size=200))
    return content[:first] + data.draw(st.binary(min_size=1, max_size=9)) + content[first:]


def mutate(data: st.DataObject, victim: Victim, *, sealed: bool) -> None:
    """Change one or two files, and with ``sealed`` their hashes."""
    names = sorted(victim.content)
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        how = data.draw(st.sampled_from(["json", "json", "json", "bytes", "copy"]))
        if how == "json":
            victim.edit(name, lambda value: mutate_json(data, value))
        elif how == "bytes":
            victim.write(name, mutate_bytes(data, victim.content[name]))
        else:
            victim.write(name, victim.content[data.draw(st.sampled_from(names))])
    if sealed:
        victim.seal()


def check_unsealed(victim: Victim, original: Loaded, data: st.DataObject) -> None:
    """Without its hashes: refused, or what was written."""
    try:
        mutate(data, victim, sealed=False)
        if outcome(victim) is None:
            assert read(victim.path) == original
    finally:
        victim.repair()


def check_sealed(victim: Victim, data: st.DataObject) -> None:
    """With its hashes: refused, or consistent, and read as others read it."""
    try:
        mutate(data, victim, sealed=True)
        if outcome(victim) is None:
            manifest, state, generators, boxes = read(victim.path)
            # Not every manifest says the tokens; where it does, the state agrees.
            assert manifest.facts["step"] == STEP
            assert manifest.facts.get("tokens", state["data"]["tokens"]) == state["data"]["tokens"]
            assert all(0 <= steps <= STEP for steps in state["optimizer"].values()) and len(generators) == 2
            assert sum(map(len, boxes.values())) == 3 * 4 * (24 + 12 + 8)
    finally:
        victim.repair()


@settings(max_examples=200)
@given(data=st.data())
def test_random_damage(victims: dict[Contents, Victim], original: Loaded, data: st.DataObject) -> None:
    check_unsealed(victims["full"], original, data)


@pytest.mark.long
@settings(max_examples=300)
@given(data=st.data())
def test_random_crafting(victims: dict[Contents, Victim], data: st.DataObject) -> None:
    check_sealed(victims["full"], data)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@settings(max_examples=5000)
@given(data=st.data())
def test_much_random_damage(victims: dict[Contents, Victim], original: Loaded, data: st.DataObject) -> None:
    check_unsealed(victims["full"], original, data)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("traced")
@settings(max_examples=4_000, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_much_random_crafting(victims: dict[Contents, Victim], data: st.DataObject) -> None:
    check_sealed(victims["full"], data)
