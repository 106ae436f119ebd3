"""A small checkpoint to damage and to craft, and what becomes of it: refused by name, or read as others read it.

Most damage is caught by the manifest's hashes. ``Victim.seal`` writes these again after a change, as somebody does who
crafts a checkpoint, so that only what the reader checks itself is in the way.
"""

import json
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
import xxhash

from lightscale.errors import UserError
from lightscale.parallel.shards import Box, TensorShard
from lightscale.training.checkpoints.directories import Contents, directory_name, environment
from lightscale.training.checkpoints.manifest import NAME, write_manifest, write_synced
from lightscale.training.checkpoints.random_states import check_random_states, random_states
from lightscale.training.checkpoints.reader import read_generators, read_headers, read_state, verify
from lightscale.training.checkpoints.tensor_file import tensor_files, write_tensors

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
