"""Damage to checkpoints, and whether it is found."""

import random
from pathlib import Path

import pytest

from lightscale.launch.chaos.faults import damaged_checkpoint as damage
from lightscale.launch.chaos.faults.damaged_checkpoint import (
    DAMAGE_KINDS,
    check_detection,
    checkpoint_directories,
    damage_file,
)
from lightscale.training.checkpoints.manifest import hash_file, write_manifest

SIZES = {"rank-00000": 10_000, "rank-00001": 9_000, "small": 1, "empty": 0}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    generator = random.Random(0)
    for step in (5, 10):
        directory = tmp_path / "checkpoints" / f"step-{step:08d}"
        directory.mkdir(parents=True)
        for name, size in SIZES.items():
            (directory / name).write_bytes(generator.randbytes(size))
        write_manifest(directory, {name: hash_file(directory / name) for name in SIZES}, {"step": step})
    for name in ("step-00000015.tmp", "step-00000020.bad"):
        (tmp_path / "checkpoints" / name).mkdir()
    return tmp_path / "checkpoints"


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("how", DAMAGE_KINDS)
def test_one_file_is_damaged(checkpoints: Path, how: str) -> None:
    newest = checkpoint_directories(checkpoints)[-1]
    assert newest.name == "step-00000010"
    chosen = set()
    for seed in range(40):
        before = content(newest)
        file = damage.damage(newest, how, random.Random(seed))
        after = content(newest)
        assert {name for name in before if before[name] != after.get(name)} == {file.name}
        assert (file.name in after) == (how != "removed")
        if how == "bit flipped":
            bits = zip(before[file.name], after[file.name], strict=True)
            assert sum((old ^ new).bit_count() for old, new in bits) == 1
        if how == "truncated":
            assert before[file.name].startswith(after[file.name])
        chosen.add(file.name)
        file.write_bytes(before[file.name])
    assert chosen == {"rank-00000", "rank-00001", "small", "MANIFEST.json"}, "nothing can be taken from an empty file"


def test_all_damage_is_found(checkpoints: Path, tmp_path: Path) -> None:
    before = content(checkpoint_directories(checkpoints)[-1])
    found = check_detection(checkpoints, tmp_path / "scratch", flips=300, seed=0)
    assert (found.flips, found.others, found.undetected) == (300, 4 * 5, [])
    assert content(checkpoint_directories(checkpoints)[-1]) == before
    assert not (tmp_path / "scratch").exists()
    nothing = check_detection(checkpoints, tmp_path / "scratch", flips=0, seed=0)
    assert (nothing.flips, nothing.others) == (0, 0)


def test_a_verifier_that_skips_a_file_is_found_out(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_files = damage.verify_files

    def careless(directory: Path, manifest: damage.Manifest, names: list[str]) -> None:
        verify_files(directory, manifest, [name for name in names if name != "rank-00001"])

    monkeypatch.setattr(damage, "verify_files", careless)
    found = check_detection(checkpoints, tmp_path / "scratch", flips=8, seed=0)
    assert found.undetected == [f"rank-00001 {how}: accepted" for how in ("bit flipped",) * 2 + DAMAGE_KINDS[1:]]


def test_an_unnamed_file_is_found_out(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def vague(path: Path) -> damage.Manifest:
        raise damage.DamagedCheckpoint("something is wrong")

    copy = checkpoint_directories(checkpoints)[-1]
    whole = damage._verify(copy)
    damage_file(copy / "small", "emptied", random.Random(0))
    monkeypatch.setattr(damage, "read_manifest", vague)
    reason = damage._fault(copy, copy / "small", whole)
    assert reason == "refused, but the file is not named: something is wrong"
