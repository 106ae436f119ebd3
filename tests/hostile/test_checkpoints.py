"""Checkpoints that were damaged or crafted: refused by name, or read as any other reader reads them; nothing else.

Most damage is caught by the manifest's hashes. Here these are written again after each change (``seal``), as somebody
does who crafts a checkpoint, so that only what the reader checks itself is in the way.
"""

import copy
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightscale.cli import main
from lightscale.config.files import to_toml
from lightscale.errors import UserError
from lightscale.parallel.shards import Box, TensorShard
from lightscale.training.checkpoints.directories import Contents, directory_name, environment, list_checkpoints, remove
from lightscale.training.checkpoints.manifest import NAME, read_manifest, write_manifest, write_synced
from lightscale.training.checkpoints.random_states import check_random_states, random_states
from lightscale.training.checkpoints.reader import read_generators, read_headers, read_state, verify
from lightscale.training.checkpoints.reading import DamagedCheckpoint
from lightscale.training.checkpoints.restore import Checkpoints, NoGoodCheckpoint
from lightscale.training.checkpoints.tensor_file import tensor_files, write_tensors

pytestmark = pytest.mark.timeout(300)

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))
GOLDEN = Path(__file__).parents[1] / "training" / "checkpoints" / "golden" / "format-2"
GOLDEN_MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}

STEP, TOKENS = 20, 5120
TENSORS = ("rank-00000.safetensors", "rank-00001.safetensors")
JSON = ("state.json", "rank-00000.json", "rank-00001.json")
MOST_S = 10.0
SPARE_BYTES = 16 << 20
"""What may be allocated beside twice the files' size."""


def write_checkpoint(parent: Path, contents: Contents = "full") -> Path:
    """A checkpoint of two data ranks, by the functions that a save uses; every file has its own numbers."""
    path = parent / directory_name(STEP, contents)
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    kinds = ("model", "exp_avg", "exp_avg_sq") if contents == "full" else ("model",)
    records = {}
    for rank in range(2):
        boxes = [
            box
            for kind in kinds
            for box in (
                Box(key=f"{kind}.output.weight", shape=(4, 6), offset=(2 * rank, 0), sizes=(2, 6)),
                Box(key=f"{kind}.layer.weight", shape=(3, 4), offset=(0, 2 * rank), sizes=(3, 2)),
                Box(key=f"{kind}.norm.weight", shape=(8,), offset=(4 * rank,), sizes=(4,)),
            )
        ]
        shards = [TensorShard(box=box, data=torch.randn(box.sizes, generator=generator)) for box in boxes]
        records[TENSORS[rank]] = write_tensors(path / TENSORS[rank], shards)
        if contents == "full":
            name = f"rank-{rank:05d}.json"
            records[name] = write_synced(path / name, json.dumps(random_states()).encode())
    data = {"tokens": TOKENS, "skips": [[256, 512]], "fingerprint": {"store": "ab", "tokenizer": "cd"}}
    guard = {"losses": [5.25, 5.0], "grad_norms": [1.5, 0.5], "skips_in_a_row": 0}
    counters = {"optimizer": {"adam_steps": 19}} if contents == "full" else {}
    state = {"data": data, "guard": guard, "step": STEP, **counters}
    records["state.json"] = write_synced(path / "state.json", json.dumps(state).encode())
    facts = {
        "step": STEP,
        "contents": contents,
        "tokens": TOKENS,
        "store": "ab",
        "config": "ef",
        "attempt": 1,
        "tokenizer": "cd",
        "layout": {"tensor": 1, "pipeline": 1, "sequence": 1, "data": 2},
        "versions": environment(),
        "hosts": ["one", "two"],
    }
    write_manifest(path, records, facts)
    return path


class Victim:
    """A checkpoint that is changed and put right again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = {file.name: file.read_bytes() for file in path.iterdir()}
        self.size = sum(map(len, self.content.values()))

    def repair(self) -> None:
        for entry in list(self.path.iterdir()):
            same = entry.name in self.content and entry.is_file() and not entry.is_symlink()
            if same and entry.read_bytes() == self.content[entry.name]:
                continue
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        for name, content in self.content.items():
            if not (self.path / name).exists():
                (self.path / name).write_bytes(content)

    def write(self, name: str, content: bytes) -> None:
        (self.path / name).write_bytes(content)

    def edit(self, name: str, change: Callable[[Any], Any]) -> None:
        """Change the JSON value in a file, or in the header of one of tensors; hashes are those of before."""
        content = self.content[name]
        if name in TENSORS:
            length = int.from_bytes(content[:8], "little")
            value = json.loads(content[8 : 8 + length])
            result = change(value)
            self.write(name, framed(value if result is None else result, content[8 + length :]))
            return
        value = json.loads(content)
        result = change(value)
        value = value if result is None else result
        self.write(name, value.encode() if isinstance(value, str) else json.dumps(value).encode())

    def seal(self) -> None:
        """Write the manifest again with the sizes and hashes of all files; as it is where it is no manifest."""
        path = self.path / NAME
        try:
            body = json.loads(path.read_bytes())
            body.pop("manifest_xxh3_128", None)
            for name, record in body["files"].items():
                if (self.path / name).is_file():
                    content = (self.path / name).read_bytes()
                    record |= {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
        except (ValueError, AttributeError, TypeError, KeyError, OSError, RecursionError):
            pass
        else:
            self.seal_manifest(body)

    def seal_manifest(self, body: dict[str, Any]) -> None:
        body.pop("manifest_xxh3_128", None)
        own = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
        self.write(NAME, json.dumps({**body, "manifest_xxh3_128": own}).encode())


def framed(header: Any, data: bytes) -> bytes:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


Loaded = tuple[Any, dict[str, Any], list[Any], dict[str, bytes]]


def read(path: Path) -> Loaded:
    """All that a run takes from a checkpoint: manifest, state, random states, the bytes of every box."""
    manifest = verify(path, STEP)
    state = read_state(path, manifest, ["data", "guard"])
    generators = []
    for name in sorted(manifest.files):
        if name.startswith("rank-") and name.endswith(".json"):
            generators.append(read_generators(path / name))
            check_random_states(generators[-1], path / name)
    boxes = {
        f"{shard.box.key}@{','.join(map(str, shard.box.offset))}": shard.data.numpy().tobytes()
        for file in tensor_files(path, read_headers(path, manifest))
        for shard in file.shards()
    }
    return manifest, state, generators, boxes


def by_others(path: Path) -> tuple[dict[str, Any], list[Any], dict[str, bytes]]:
    """The same by plain JSON and the safetensors library."""
    boxes: dict[str, bytes] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                boxes[name] = opened.get_tensor(name).numpy().tobytes()
    state = json.loads((path / "state.json").read_bytes())
    return state, [json.loads(file.read_bytes()) for file in sorted(path.glob("rank-*.json"))], boxes


def traced_read(path: Path) -> Loaded:
    """As ``read``; fails where more was allocated than twice the files' size and a constant."""
    there = sum(file.lstat().st_size for file in path.iterdir())
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        return read(path)
    finally:
        assert tracemalloc.get_traced_memory()[1] - before <= 2 * there + SPARE_BYTES


def outcome(victim: Victim) -> str | None:
    """Why it is refused; None: it was read, as others read it. Anything else fails: another error, time, memory."""
    began = time.monotonic()
    try:
        _, *found = traced_read(victim.path)
    except UserError as error:
        assert time.monotonic() - began < MOST_S
        message = str(error)
        assert str(victim.path) in message, message
        assert message.isprintable() and len(message) < 1000, message
        return message
    assert time.monotonic() - began < MOST_S
    assert tuple(found) == by_others(victim.path)
    return None


@pytest.fixture
def traced() -> Iterator[None]:
    """Memory is counted, which makes JSON several times slower."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture(scope="module")
def original(victims: dict[Contents, Victim]) -> Loaded:
    return read(victims["full"].path)


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> dict[Contents, Victim]:
    parent = tmp_path_factory.mktemp("run") / "checkpoints"
    return {"full": Victim(write_checkpoint(parent)), "weights": Victim(write_checkpoint(parent, "weights"))}


@pytest.fixture
def victim(victims: dict[Contents, Victim]) -> Iterator[Victim]:
    yield victims["full"]
    victims["full"].repair()


@pytest.fixture
def alone(victims: dict[Contents, Victim]) -> Iterator[Victim]:
    yield victims["weights"]
    victims["weights"].repair()


def test_what_was_written_is_read(victim: Victim, alone: Victim) -> None:
    for one in (victim, alone):
        assert outcome(one) is None
        one.seal()
        assert outcome(one) is None


# --- One by one ---------------------------------------------------------------------------------------------------


def setting(*keys: Any, to: Any) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    return change


def without(*keys: Any) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        del value[keys[-1]]

    return change


def renaming(old: str, new: str) -> Callable[[Any], None]:
    """In the manifest: a file under another name."""

    def change(body: Any) -> None:
        body["files"][new] = body["files"].pop(old)

    return change


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


OUTPUT = "model.output.weight@0,0"
LAYER = "model.layer.weight@0,0"
LOW, HIGH = ("data_offsets", 0), ("data_offsets", 1)


def moving(name: str, by: int) -> Callable[[Any], None]:
    def change(header: Any) -> None:
        header[name]["data_offsets"] = [at + by for at in header[name]["data_offsets"]]

    return change


def shapes(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def edit(header: Any) -> None:
        value = json.loads(header["__metadata__"]["shapes"])
        result = change(value)
        header["__metadata__"]["shapes"] = result if isinstance(result, str) else json.dumps(value)

    return edit


def box_renamed(old: str, new: str) -> Callable[[Any], Any]:
    return lambda header: {new if key == old else key: value for key, value in header.items()}


# Name: the file, the change of its JSON value, and what the refusal says.
CASES: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "a name that leads out of the directory": (NAME, renaming("state.json", "../state.json"), "../state.json"),
    "an absolute name": (NAME, renaming("state.json", "/etc/passwd"), "/etc/passwd"),
    "a device": (NAME, renaming("state.json", "/dev/zero"), "/dev/zero"),
    "a name in a directory": (NAME, renaming("state.json", "sub/state.json"), "sub/state.json"),
    "a name of control characters": (NAME, renaming("state.json", "\x1b[31m\n"), "files"),
    "half of a surrogate pair": (NAME, setting("hosts", 0, to="\ud800"), "hosts.0"),
    "a host that moves the cursor": (NAME, setting("hosts", 0, to="\x1b[2J"), "hosts.0"),
    "a file more": (NAME, lambda body: body["files"].update(extra=body["files"]["state.json"]), "has a extra"),
    "a rank more": (NAME, lambda body: body["files"].update({"rank-00002.json": body["files"][JSON[1]]}), "rank-00002"),
    "a file less": (NAME, without("files", "rank-00001.json"), "has no rank-00001.json"),
    "no files": (NAME, without("files"), "files"),
    "files as a list": (NAME, setting("files", to=[]), "files"),
    "files as null": (NAME, setting("files", to=None), "files"),
    "a record that is a number": (NAME, setting("files", "state.json", to=3), "files.state.json"),
    "a record without a hash": (NAME, without("files", "state.json", "xxh3_128"), "files.state.json.xxh3_128"),
    "a hash of another form": (NAME, setting("files", "state.json", "xxh3_128", to="zz"), "xxh3_128"),
    "a negative size": (NAME, setting("files", "state.json", "bytes", to=-1), "files.state.json.bytes"),
    "a size as text": (NAME, setting("files", "state.json", "bytes", to="9"), "files.state.json.bytes"),
    "a size that is true": (NAME, setting("files", "state.json", "bytes", to=True), "files.state.json.bytes"),
    "a huge size": (NAME, setting("files", "state.json", "bytes", to=10**30), "files.state.json.bytes"),
    "no step": (NAME, without("step"), "step"),
    "a step as text": (NAME, setting("step", to="20"), "step"),
    "another step": (NAME, setting("step", to=21), "expected step 20, found 21"),
    "a step of 30 digits": (NAME, setting("step", to=10**30), "step"),
    "tokens as text": (NAME, setting("tokens", to="many"), "tokens"),
    "other tokens": (NAME, setting("tokens", to=TOKENS + 256), "expected 5376 tokens as in MANIFEST.json, found 5120"),
    "no layout": (NAME, without("layout"), "layout"),
    "a layout of text": (NAME, setting("layout", to="one"), "layout"),
    "a layout without an axis": (NAME, without("layout", "data"), "layout.data"),
    "an axis of no rank": (NAME, setting("layout", "data", to=0), "layout.data"),
    "a layout of more ranks": (NAME, setting("layout", "tensor", to=2), "a layout of 4 ranks, and the hosts of 2"),
    "ranks without files": (
        NAME,
        lambda body: body.update(hosts=["a"] * 4, layout={**body["layout"], "data": 4}),
        "has no rank-00002.json",
    ),
    "no versions": (NAME, without("versions"), "versions"),
    "versions as a list": (NAME, setting("versions", to=["torch"]), "versions"),
    "a version that is a number": (NAME, setting("versions", "torch", to=2), "versions.torch"),
    "no hosts": (NAME, without("hosts"), "hosts"),
    "hosts as text": (NAME, setting("hosts", to="ab"), "hosts"),
    "other contents": (NAME, setting("contents", to="everything"), "contents"),
    "contents of weights": (NAME, setting("contents", to="weights"), "its name is step-00000020-weights"),
    "a format that is text": (NAME, setting("format", to="2"), "format"),
    "a format that is true": (NAME, setting("format", to=True), "format"),
    "no format": (NAME, without("format"), "format"),
    "a manifest that is a list": (NAME, lambda body: [body], "expected a JSON object"),
    "a manifest that is nested": (NAME, lambda body: nested(10_000), "nested"),
    "a fact that is nested": (NAME, lambda body: json.dumps(body)[:-1] + f', "x": {nested(40)}}}', "nested"),
    "a number of 5000 digits": (NAME, lambda body: json.dumps(body)[:-1] + f', "x": {"9" * 5000}}}', "JSON"),
    "a key twice": (NAME, lambda body: json.dumps(body)[:-1] + ', "step": 20}', "'step' is there twice"),
    "a state that is a list": ("state.json", lambda state: [], "expected a JSON object"),
    "a state that is empty": ("state.json", lambda state: "", "JSON"),
    "a state that is nested": ("state.json", lambda state: nested(100_000), "nested"),
    "a state with a key twice": (
        "state.json",
        lambda state: json.dumps(state)[:-1] + ', "step": 20}',
        "'step' is there twice",
    ),
    "a state of another step": ("state.json", setting("step", to=19), "expected step 20, found 19"),
    "a state without a step": ("state.json", without("step"), "step"),
    "optimizer: null": ("state.json", setting("optimizer", to=None), "optimizer"),
    "no optimizer": ("state.json", without("optimizer"), "no counters of an optimizer"),
    "a negative counter": ("state.json", setting("optimizer", "adam_steps", to=-1), "optimizer.adam_steps"),
    "a counter that is text": ("state.json", setting("optimizer", "adam_steps", to="3"), "optimizer.adam_steps"),
    "a counter that is a fraction": ("state.json", setting("optimizer", "adam_steps", to=3.5), "optimizer.adam_steps"),
    "more steps than the run": ("state.json", setting("optimizer", "adam_steps", to=21), "21 steps as adam_steps"),
    "another count of tokens": ("state.json", setting("data", "tokens", to=TOKENS - 256), "expected 5120 tokens"),
    "tokens that are a fraction": ("state.json", setting("data", "tokens", to=5120.0), "data.tokens"),
    "no data": ("state.json", without("data"), "has no data"),
    "data: null": ("state.json", setting("data", to=None), "data"),
    "skips under another key": (
        "state.json",
        lambda state: state["data"].update(skip=state["data"].pop("skips")),
        "skip",
    ),
    "a skip of one number": ("state.json", setting("data", "skips", to=[[1]]), "data.skips.0"),
    "a skip of nothing": ("state.json", setting("data", "skips", to=[[1, 0]]), "data.skips.0.1"),
    "a skip that is to come": ("state.json", setting("data", "skips", to=[[TOKENS + 1, 4]]), "skipped after 5121"),
    "a fingerprint that is a list": ("state.json", setting("data", "fingerprint", to=[]), "data.fingerprint"),
    "a fingerprint of nothing": ("state.json", setting("data", "fingerprint", to={}), "no tokenizer"),
    "no guard": ("state.json", without("guard"), "has no guard"),
    "guard: null": ("state.json", setting("guard", to=None), "guard"),
    "a loss that is NaN": ("state.json", setting("guard", "losses", 0, to=float("nan")), "NaN is no number"),
    "a loss that is infinite": (
        "state.json",
        lambda state: json.dumps(state).replace("5.25", "1e999"),
        "number 1e999 is too large",
    ),
    "a loss that is a word": ("state.json", setting("guard", "losses", 0, to="low"), "guard.losses.0"),
    "a loss of 400 digits": ("state.json", setting("guard", "losses", 0, to=10**400), "guard.losses.0"),
    "losses without norms": ("state.json", setting("guard", "grad_norms", to=[1.0]), "2 losses and 1 norms"),
    "skips in a row below 0": ("state.json", setting("guard", "skips_in_a_row", to=-1), "guard.skips_in_a_row"),
    "no torch generator": ("rank-00001.json", without("torch"), "rank-00001.json: torch"),
    "a torch generator that is short": ("rank-00000.json", setting("torch", to="00"), "rank-00000.json"),
    "a torch generator of zeros": ("rank-00000.json", setting("torch", to="00" * 5056), "no state of a generator"),
    "a torch generator of words": ("rank-00000.json", setting("torch", to="no hex"), "torch"),
    "a torch generator of huge size": ("rank-00000.json", setting("torch", to="00" * (1 << 20)), "at most 262144"),
    "Python's generator short": ("rank-00000.json", setting("python", 1, to=[1, 2]), "python.1"),
    "Python's generator of words": ("rank-00000.json", setting("python", 1, 3, to="7"), "python.1.3"),
    "Python's generator at 0": ("rank-00000.json", setting("python", 1, 624, to=0), "at position 0"),
    "Python's generator of another version": ("rank-00000.json", setting("python", 0, to=2), "python.0"),
    "a word of 33 bits": ("rank-00000.json", setting("numpy", 1, 0, to=1 << 32), "numpy.1.0"),
    "NumPy's generator of another kind": ("rank-00000.json", setting("numpy", 0, to="PCG64"), "numpy.0"),
    "NumPy's generator at 700": ("rank-00000.json", setting("numpy", 2, to=700), "numpy.2"),
    "random states as a list": ("rank-00000.json", lambda states: [states], "expected a JSON object"),
    "no shapes": (TENSORS[0], without("__metadata__"), "no shapes"),
    "shapes that are no text": (TENSORS[0], setting("__metadata__", "shapes", to={}), "no shapes"),
    "shapes that are no JSON": (TENSORS[0], setting("__metadata__", "shapes", to="{"), "JSON"),
    "more metadata": (TENSORS[0], setting("__metadata__", "run", to="x"), "no shapes"),
    "a shape less": (TENSORS[0], shapes(without("model.output.weight")), OUTPUT),
    "a shape more": (TENSORS[0], shapes(setting("model.more", to=[1])), "model.more"),
    "a shape of other ranks": (TENSORS[0], shapes(setting("model.output.weight", to=[8, 6])), "several shapes"),
    "a shape of fractions": (TENSORS[0], shapes(setting("model.output.weight", to=[4.0, 6])), "shape.0"),
    "a shape of 2 ** 60": (TENSORS[0], shapes(setting("model.output.weight", to=[1 << 60, 6])), "shape.0"),
    "a shape that is nested": (TENSORS[0], shapes(lambda value: nested(100_000)), "nested"),
    "no dtype": (TENSORS[0], without(OUTPUT, "dtype"), f"{OUTPUT}.dtype"),
    "a dtype of objects": (TENSORS[0], setting(OUTPUT, "dtype", to="O"), f"{OUTPUT}.dtype"),
    "whole numbers as weights": (
        TENSORS[0],
        setting(OUTPUT, "dtype", to="I32"),
        "model.output.weight has numbers of F32, I32",
    ),
    "half numbers as weights": (TENSORS[0], setting(OUTPUT, "dtype", to="BF16"), "bytes"),
    "overlapping offsets": (TENSORS[0], moving(LAYER, -8), "begins at byte"),
    "offsets of another tensor": (
        TENSORS[0],
        lambda header: header["exp_avg.output.weight@0,0"].update(data_offsets=header[OUTPUT]["data_offsets"]),
        "begins at byte",
    ),
    "offsets that leave a hole": (TENSORS[0], moving(OUTPUT, 8), "begins at byte"),
    "offsets behind the file": (TENSORS[0], moving(OUTPUT, 1 << 40), "begins at byte"),
    "offsets that are negative": (TENSORS[0], moving(OUTPUT, -64), "data_offsets"),
    "offsets the wrong way round": (TENSORS[0], lambda header: header[OUTPUT]["data_offsets"].reverse(), "its place"),
    "offsets of three": (TENSORS[0], setting(OUTPUT, "data_offsets", to=[0, 48, 48]), "data_offsets"),
    "a tensor that is not there": (TENSORS[0], without(OUTPUT), "begins at byte"),
    "a box of another size": (TENSORS[0], setting(OUTPUT, "shape", to=[3, 6]), "bytes"),
    "a box of no elements": (TENSORS[0], setting(OUTPUT, "shape", to=[0, 6]), f"{OUTPUT}.shape.0"),
    "a box of nine dims": (TENSORS[0], setting(OUTPUT, "shape", to=[1] * 7 + [2, 6]), f"{OUTPUT}.shape"),
    "a box of other dims": (TENSORS[0], setting(OUTPUT, "shape", to=[12]), "does not fit into"),
    "a box behind its tensor": (TENSORS[0], box_renamed(OUTPUT, "model.output.weight@3,0"), "does not fit into"),
    "a box that others hold": (TENSORS[0], box_renamed(OUTPUT, "model.output.weight@2,0"), "is held 0 times at (0, 0)"),
    "a box below 0": (TENSORS[0], box_renamed(OUTPUT, "model.output.weight@-1,0"), "no name of a box"),
    "a box without an offset": (TENSORS[0], box_renamed(OUTPUT, "model.output.weight"), "no name of a box"),
    "a name that cannot be printed": (TENSORS[0], box_renamed(OUTPUT, "model.\x1b[2J@0,0"), "no name of a box"),
    "a name of half a pair": (TENSORS[0], box_renamed(OUTPUT, "model.\ud800@0,0"), "no name of a box"),
    "a box with more to it": (TENSORS[0], setting(OUTPUT, "sparse", to=True), f"{OUTPUT}.sparse"),
    "a box that is a number": (TENSORS[0], setting(OUTPUT, to=4), OUTPUT),
    "a header that is a list": (TENSORS[0], lambda header: [header], "expected a JSON object"),
    "a header that is nested": (TENSORS[0], lambda header: nested(100_000), "nested"),
    "a header with a key twice": (
        TENSORS[0],
        lambda header: json.dumps(header)[:-1] + f', "{OUTPUT}": 1}}',
        "is there twice",
    ),
}


def craft(victim: Victim, case: str) -> None:
    """Make the change of ``case``, and write the hashes again."""
    name, change, _ = CASES[case]
    if name == NAME:
        body = json.loads(victim.content[NAME])
        result = change(body)
        if isinstance(result, str | list):
            victim.write(NAME, result.encode() if isinstance(result, str) else json.dumps(result).encode())
        else:
            victim.seal_manifest(body)
    else:
        victim.edit(name, change)
        victim.seal()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("case", CASES)
def test_a_crafted_value_is_refused_by_its_name(case: str, victim: Victim) -> None:
    expected = CASES[case][2]
    craft(victim, case)
    message = outcome(victim)
    assert message is not None
    assert expected in message
    with pytest.raises(DamagedCheckpoint):
        read(victim.path)


def test_moments_among_weights_alone(alone: Victim) -> None:
    for rank in range(2):
        alone.edit(TENSORS[rank], lambda header: json.dumps(header).replace("model.norm", "exp_avg.norm"))
    alone.seal()
    assert "exp_avg.norm.weight, and holds weights alone" in (outcome(alone) or "")
    alone.repair()
    alone.edit("state.json", setting("optimizer", to={}))
    alone.seal()
    assert "has the counters of an optimizer, and holds weights alone" in (outcome(alone) or "")


def test_moments_of_other_tensors(victim: Victim) -> None:
    for rank in range(2):
        victim.edit(TENSORS[rank], lambda header: json.dumps(header).replace("exp_avg.norm", "exp_avg.morn"))
    victim.seal()
    assert "of exp_avg is not that of the weights" in (outcome(victim) or "")


def test_a_box_that_is_held_twice(victim: Victim) -> None:
    """As many elements as there are, one of them twice and another never."""
    victim.edit(TENSORS[1], box_renamed("model.norm.weight@4", "model.norm.weight@3"))
    victim.seal()
    assert "model.norm.weight is held 2 times at (3,)" in (outcome(victim) or "")


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
        with pytest.raises(DamagedCheckpoint, match=f"{path.name}: a symbolic link; a checkpoint is a directory"):
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
    expected = ("at most", "at most", "at most", "a header of 1152921504606846976 bytes", "state.json", "12 are held")
    for line, words in zip(lines, expected, strict=True):
        assert words in line


# --- What uses it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        "an absolute name",
        "files as null",
        "a host that moves the cursor",
        "no layout",
        "a format that is true",
        "a manifest that is a list",
        "optimizer: null",
        "a torch generator that is short",
        "overlapping offsets",
        "a name that cannot be printed",
        "no shapes",
    ],
)
def test_the_command_names_what_is_wrong(
    victims: dict[Contents, Victim], tiny_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    run = tmp_path / "[/run]"
    whole, crafted = (run / "checkpoints" / directory_name(step) for step in (STEP, STEP + 1))
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(tiny_config()))
    shutil.copytree(victims["full"].path, whole)
    shutil.copytree(victims["full"].path, crafted)
    victim = Victim(crafted)
    at_next(victim)
    victim.content = {file.name: file.read_bytes() for file in crafted.iterdir()}
    craft(victim, case)

    def command(*words: str) -> tuple[int, str]:
        code = main(["checkpoint", *words])
        output = capsys.readouterr()
        assert all(line.isprintable() for line in (output.out + output.err).splitlines())
        return code, output.out + output.err

    code, text = command("verify", str(run))
    assert code == 1 and "step 20: whole" in text and f"step 21: {crafted}" in text
    code, text = command("list", str(run), "--json")
    assert [row["step"] for row in json.loads(text)["checkpoints"]] == [STEP, STEP + 1]
    assert code == (1 if CASES[case][0] == NAME else 0)
    assert command("list", str(run))[0] == code
    # Of what it shows: the manifest and the headers.
    shown_too = CASES[case][0] in ("state.json", "rank-00000.json")
    assert (command("show", f"{run}@21")[0] == 0) == shown_too
    code, text = command("diff", f"{run}@20", f"{run}@21")
    assert code == 78 and str(crafted) in text
    assert "nothing removed: only 1 of the checkpoints" in command("prune", str(run))[1]
    assert whole.is_dir() and crafted.is_dir()


def at_next(victim: Victim) -> None:
    """Make it the checkpoint of the step behind."""
    victim.edit("state.json", setting("step", to=STEP + 1))
    body = json.loads(victim.content[NAME])
    victim.seal_manifest({**body, "step": STEP + 1})
    victim.seal()


def restore_crafted(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[str, str, bool]]:
    """On the golden checkpoint, a real one: (case, refusal, whether the state is as before)."""
    golden = GOLDEN / directory_name(1)
    found = []
    with tiny.engine_on((1, 1, 1, 1), rank, init_method, seed=7, **GOLDEN_MODEL) as engine:

        def attempt(case: str, change: Callable[[Victim], None], **kept: Any) -> None:
            victim = Victim(Path(shutil.copytree(golden, Path(folder) / case / directory_name(1))))
            change(victim)
            before = tiny.own_state(engine)
            generators = random_states()
            try:
                Checkpoints(victim.path.parent, engine.mesh, **kept).restore(engine, allow=["versions"])
                message = "accepted"
            except NoGoodCheckpoint as refusal:
                message = str(refusal)
            same = tiny.differing(before, tiny.own_state(engine)) == [] and random_states() == generators
            found.append((case, message, same))

        for case in RESTORED:
            attempt(case, lambda victim, case=case: craft(victim, case))
        counters = setting("optimizer", to={"sgd_steps": 1})
        attempt("other counters", lambda victim: (victim.edit("state.json", counters), victim.seal()))
        attempt("other tokens", lambda victim: None, tokens_per_step=96)
        attempt("no guard", lambda victim: None, parts=["guard"])
        attempt("no tokenizer", lambda victim: None, parts=["data"])
        attempt("whole", lambda victim: None, tokens_per_step=192)
    return found


RESTORED = (
    "a name that leads out of the directory",
    "files as null",
    "optimizer: null",
    "another count of tokens",
    "a torch generator of zeros",
    "Python's generator short",
    "no shapes",
)


def test_no_weight_changes_before_all_is_checked(run_ranks: Any, tmp_path: Path) -> None:
    (found,) = run_ranks(restore_crafted, 1, str(tmp_path))
    *refused, whole = found
    assert whole == ("whole", "accepted", False)
    expected = {case: CASES[case][2] for case in RESTORED if case != "another count of tokens"} | {
        "another count of tokens": "expected 192 tokens as in MANIFEST.json, found 4864",
        "other counters": "expected the counters adam_steps of the optimizer, found sgd_steps",
        "other tokens": "expected 96 tokens after 1 steps of 96, found 192",
        "no guard": "state.json: has no guard",
        "no tokenizer": "its fingerprint of the data has no tokenizer",
    }
    assert len(refused) == len(expected)
    for case, message, same in refused:
        assert expected[case] in message and same, (case, message)


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
