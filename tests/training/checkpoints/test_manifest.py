import json
import os
import random
import shutil
from pathlib import Path

import pytest
import xxhash

from lightscale.errors import UserError
from lightscale.training.checkpoints.manifest import (
    NAME,
    Manifest,
    hash_file,
    read_manifest,
    verify_files,
    write_manifest,
)
from lightscale.training.checkpoints.reading import DamagedCheckpoint

FACTS = {"step": 7, "tokens": 1 << 40, "layout": {"tensor": 2, "data": 1}, "versions": {"torch": "2.13.0"}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Files of several sizes, an empty one among them, and their manifest."""
    path = tmp_path / "step-00000007"
    path.mkdir()
    generator = random.Random(0)
    for number, size in enumerate((0, 1, 100, 5000, (4 << 20) + 1)):
        (path / f"file-{number}").write_bytes(generator.randbytes(size))
    write_manifest(path, {file.name: hash_file(file) for file in path.iterdir()}, FACTS)
    return path


def check(directory: Path) -> Manifest:
    manifest = read_manifest(directory)
    verify_files(directory, manifest, manifest.files)
    return manifest


def test_a_manifest_is_read_as_it_was_written(directory: Path) -> None:
    manifest = check(directory)
    assert manifest.facts == FACTS
    assert sorted(manifest.files) == [f"file-{number}" for number in range(5)]
    for name, record in manifest.files.items():
        data = (directory / name).read_bytes()
        assert (record.num_bytes, record.xxh3_128) == (len(data), xxhash.xxh3_128_hexdigest(data))


@pytest.mark.long
def test_every_flipped_bit_of_the_manifest_is_noticed(directory: Path) -> None:
    path = directory / NAME
    text = path.read_bytes()
    for offset in range(len(text)):
        for bit in range(8):
            path.write_bytes(text[:offset] + bytes([text[offset] ^ (1 << bit)]) + text[offset + 1 :])
            with pytest.raises(DamagedCheckpoint, match=NAME):
                read_manifest(directory)


def test_every_shortened_manifest_is_noticed(directory: Path) -> None:
    path = directory / NAME
    text = path.read_bytes()
    # The last byte is a newline, which says nothing.
    for size in range(len(text) - 1):
        path.write_bytes(text[:size])
        with pytest.raises(DamagedCheckpoint, match=NAME):
            read_manifest(directory)


def test_flipped_bits_of_files_are_noticed(directory: Path) -> None:
    generator = random.Random(1)
    for _ in range(300):
        name = f"file-{generator.randrange(1, 5)}"
        path = directory / name
        offset, mask = generator.randrange(path.stat().st_size), 1 << generator.randrange(8)
        with path.open("r+b") as file:
            for damaged in (True, False):
                file.seek(offset)
                (byte,) = file.read(1)
                file.seek(offset)
                file.write(bytes([byte ^ mask]))
                file.flush()
                manifest = read_manifest(directory)
                if damaged:
                    with pytest.raises(DamagedCheckpoint, match=f"{name}: expected xxh3-128 .*, found "):
                        verify_files(directory, manifest, [name])
                else:
                    verify_files(directory, manifest, [name])


def test_files_that_are_gone_cut_short_grown_emptied_or_swapped(directory: Path) -> None:
    def damaged(name: str) -> str:
        with pytest.raises(DamagedCheckpoint) as caught:
            check(directory)
        assert str(caught.value).startswith(f"{directory / name}: expected ")
        return str(caught.value)

    file = directory / "file-3"
    data = file.read_bytes()
    for size in (4999, 5001, 0):
        os.truncate(file, size)
        assert f"expected 5000 bytes, found {size}" in damaged("file-3")
        file.write_bytes(data)
    file.write_bytes(data[:512] + bytes(4096) + data[4608:])
    assert "expected xxh3-128" in damaged("file-3")
    file.rename(directory / "held")
    assert "expected 5000 bytes, found No such file or directory" in damaged("file-3")
    file.mkdir()
    with pytest.raises(DamagedCheckpoint, match="file-3: a directory; a file of a checkpoint is a regular file"):
        check(directory)
    file.rmdir()
    (directory / "file-2").rename(file)
    (directory / "held").rename(directory / "file-2")
    assert "expected 100 bytes, found 5000" in damaged("file-2")


def test_a_directory_without_manifest_was_not_finished(directory: Path) -> None:
    (directory / NAME).unlink()
    with pytest.raises(DamagedCheckpoint, match="is missing: the checkpoint is unfinished"):
        read_manifest(directory)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"manifest_xxh3_128": 3}', '{"files": []}', "\xff"])
def test_other_texts_are_no_manifest(directory: Path, text: str) -> None:
    (directory / NAME).write_text(text, encoding="latin-1")
    with pytest.raises(DamagedCheckpoint, match=NAME):
        read_manifest(directory)


def test_another_format_is_no_damage(directory: Path) -> None:
    (directory / NAME).unlink()
    write_manifest(directory, {}, {**FACTS, "format": 3})
    with pytest.raises(UserError, match="has format 3, and this version of lightscale reads 2") as caught:
        read_manifest(directory)
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_facts_cannot_be_changed_by_hand(directory: Path) -> None:
    path = directory / NAME
    body = json.loads(path.read_text())
    body["step"] = 8
    path.write_text(json.dumps(body))
    with pytest.raises(DamagedCheckpoint, match=r"expected hash .*, found "):
        read_manifest(directory)


def test_a_copied_directory_is_as_good(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    assert check(tmp_path / "copy") == check(directory)
