"""A store that was changed in any way is found out, and the file is named."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.data_pipeline.store.format import array_layouts, content_hash, hash_attributes
from lightscale.data_pipeline.store.shards import ShardWriter
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.store.verify import Verification, verify_store
from lightscale.errors import UserError

EOT = 256
WriteStore = Callable[..., TokenStore]
DOCUMENTS = {
    "code": [list(range(60)), list(range(100)), [7]],
    "text": [[5] * 30] * 9,
    "text-validation": [[1, 2, 3]],
}


@pytest.fixture
def store(write_store: WriteStore) -> Path:
    """Three sources in shards of 64 values."""
    return write_store(DOCUMENTS).path


def verify(path: Path) -> Verification:
    return verify_store(path, lambda step, done, total: None)


def test_a_store_as_it_was_written_is_whole(store: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    found = verify_store(store, lambda *step: steps.append(step))
    shards = [path for path in store.rglob("*") if path.is_file() and "c" in path.relative_to(store).parts]
    assert found.faults == []
    assert found.num_shards == len(shards) > 8
    assert found.num_bytes == sum(path.stat().st_size for path in shards) == steps[-1][1] == steps[-1][2]
    assert {name: source["documents"] for name, source in found.sources.items()} == {
        "code": 3,
        "text": 9,
        "text-validation": 1,
    }


def test_a_flipped_bit_anywhere_in_any_shard_is_found_and_the_shard_is_named(store: Path) -> None:
    generator = random.Random(0)
    for shard in sorted([*store.glob("*/*/c/*"), *store.glob("*/hashes/*/c/*")]):
        raw = shard.read_bytes()
        changed = bytearray(raw)
        offset = generator.randrange(len(raw))
        changed[offset] ^= 1 << generator.randrange(8)
        shard.write_bytes(changed)
        faults = verify(store).faults
        assert any(fault.startswith(f"{shard}: content hash") for fault in faults), (shard, offset, faults)
        assert all(str(shard) in fault or f"{shard.parent.parent}: " in fault for fault in faults)
        shard.write_bytes(raw)
    assert verify(store).faults == []


def edit_source(store: Path, source: str, **changes: object) -> None:
    path = store / source / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["attributes"] |= changes
    path.write_text(json.dumps(metadata))


def rewrite(store: Path, source: str, array: str, values: list[int]) -> None:
    """Other values in an array, with hashes that fit: what a wrong writer would leave."""
    directory, blocks = store / source / array, store / source / "hashes" / array
    for path in (directory, blocks):
        shutil.rmtree(path)
    writer = ShardWriter(directory, array_layouts(64, 8)[array], hashes=blocks)
    writer.append(np.array(values, dtype=writer.layout.numpy_dtype))
    writer.close()
    attributes = json.loads((store / source / "zarr.json").read_text())["attributes"]
    for key, of_arrays in hash_attributes({array: writer.shard_hashes}).items():
        if key != "block_bytes":
            attributes[key] |= of_arrays
    attributes["content_hash"] = content_hash(attributes["shard_hashes"])
    edit_source(store, source, **attributes)


CODE = [EOT, *range(60), EOT, *range(100), EOT, 7]


@pytest.mark.parametrize(
    ("array", "values", "message"),
    [
        ("tokens", [*CODE[:70], 257, *CODE[71:]], "token 70 is 257, the last id is 256"),
        ("tokens", [*CODE[:70], EOT, *CODE[71:]], "token 70 is a document start or end of text, but not both"),
        ("tokens", [9, *CODE[1:]], "token 0 is a document start or end of text, but not both"),
        ("doc_ends", [61, 61, 164], "document 1 ends at 61, the previous document at 61"),
        ("doc_ends", [162, 61, 164], "document 1 ends at 61, the previous document at 162"),
        ("doc_ends", [60, 162, 164], "token 60 is a document start or end of text, but not both"),
        ("doc_ends", [61, 162, 163], "the last document ends at 163 of 164 tokens"),
    ],
)
def test_values_that_cannot_be_are_found_though_the_hashes_fit(
    store: Path, array: str, values: list[int], message: str
) -> None:
    rewrite(store, "code", array, values)
    (fault,) = verify(store).faults
    assert message in fault
    assert f"{store}/code/" in fault
    assert set(verify(store).sources) == {"text", "text-validation"}


def swap_two_tokens(ranks: Path) -> None:
    (one, first), (other, second), *rest = [line.split() for line in ranks.read_bytes().splitlines()]
    lines = [[other, first], [one, second], *rest]
    ranks.write_bytes(b"".join(b" ".join(line) + b"\n" for line in lines))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda store: (store / "code/tokens/c/1").unlink(), "code/tokens/c/1: No such file or directory"),
        (
            lambda store: (store / "code/tokens/c/9").write_bytes(b""),
            "code/tokens/c/9: does not belong to a shard of this store",
        ),
        (lambda store: (store / "code/zarr.json").unlink(), "code/zarr.json: No such file"),
        (
            lambda store: edit_source(store, "code", content_hash="00"),
            "content_hash 00 does not match its shard_hashes",
        ),
        (lambda store: edit_source(store, "code", shard_hashes={}), "code/zarr.json: damaged attributes"),
        (lambda store: (store / "tokenizer/ranks.tiktoken").write_bytes(b"YQ== 0\n"), "no rank for the byte 0x00"),
        (lambda store: swap_two_tokens(store / "tokenizer/ranks.tiktoken"), "changed after the store was"),
        (lambda store: (store / "text/tokens/zarr.json").write_text("{"), "text/tokens/zarr.json: not JSON"),
    ],
)
def test_other_damage_is_named(store: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(store)
    faults = verify(store).faults
    assert [fault for fault in faults if message in fault]
    assert len(faults) == len(set(faults)) <= 2


def test_the_command_says_whole_or_names_what_is_not(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(store)]) == 0
    assert f"{store}: whole; " in capsys.readouterr().out
    shard = store / "text/tokens/c/2"
    shard.write_bytes(shard.read_bytes().replace(b"\x05", b"\x04", 1))
    assert main(["data", "verify", str(store)]) == 78
    shown = capsys.readouterr().out
    assert f"{shard}: content hash" in shown and f"{store}: 1 fault; " in shown
    assert main(["data", "verify", str(store), "--json"]) == 78
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], len(found["faults"]), set(found["sources"])) == (False, 1, {"code", "text-validation"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format version 99, this version of lightscale reads 1 to 2"),
        ({"format": "other"}, "format 'other'"),
    ],
)
def test_a_store_of_another_version_is_refused(store: Path, change: dict[str, object], message: str) -> None:
    edit_source(store, "", **change)
    with pytest.raises(UserError, match=message):
        verify(store)
