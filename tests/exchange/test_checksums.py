"""XXH128SUMS: a changed bit of an export is detected, wherever it is, and by the usual command too."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import lightscale
from lightscale.cli import main
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import choose_run
from lightscale.exchange.export import export
from lightscale.exchange.files import checksums
from lightscale.exchange.files.checksums import NAME, require_unchanged

UNLISTED = {"README.md", NAME}


@pytest.fixture(scope="module")
def exported(saved_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files."""
    folder = tmp_path_factory.mktemp("checksums") / "to"
    done = export(choose_run(saved_runs / "tnl"), folder, dtype="fp32", shard_bytes=60_000)
    assert NAME in done.files
    return folder


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "to"))


def checksum_faults(folder: Path) -> list[str]:
    return checksums.checksum_faults(folder, lambda step, done, total: None)


def flip(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def test_a_flipped_bit_of_any_file_is_detected(copy: Path) -> None:
    """In the first, a middle and the last byte of each file but the model card."""
    require_unchanged(copy)
    files = [path for path in copy.rglob("*") if path.is_file() and path.relative_to(copy).as_posix() not in UNLISTED]
    assert len(files) >= 8
    for path in files:
        for byte in (0, path.stat().st_size // 2, -1):
            flip(path, byte)
            (fault,) = checksum_faults(copy)
            assert fault.startswith(f"{path}: expected xxh3-128 ")
            flip(path, byte)
    assert checksum_faults(copy) == []


def test_a_changed_weight_is_neither_loaded_nor_imported(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last byte of a file of tensors: nothing else can detect it."""
    shard = sorted(copy.glob("*.safetensors"))[1]
    lightscale.load(copy)
    flip(shard, -1)
    with pytest.raises(
        UserError, match=f"{shard}: expected xxh3-128 .*, found .*\ncopy the files again, or remove {copy / NAME}"
    ):
        lightscale.load(copy)
    assert main(["import", str(copy), "--run", str(tmp_path / "run")]) == 78
    assert f"{shard}: expected xxh3-128" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (copy / NAME).unlink()
    lightscale.load(copy)


def test_the_model_card_may_be_edited(copy: Path) -> None:
    (copy / "README.md").write_text("Mine.\n")
    assert checksum_faults(copy) == []


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "tokenizer_config.json").unlink()
    (fault,) = checksum_faults(copy)
    assert fault == f"{copy / 'tokenizer_config.json'}: missing; {NAME} lists it"


@pytest.mark.parametrize("line", ["nothing", "0" * 32 + "  ../outside", "0" * 32 + "  /etc/passwd", "\xff" * 40])
def test_a_line_that_is_no_hash_of_a_file_here_is_refused(copy: Path, line: str) -> None:
    with (copy / NAME).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    number = len((copy / NAME).read_text().splitlines())
    with pytest.raises(UserError, match=f"{NAME}, line {number}: expected an xxh3-128"):
        require_unchanged(copy)


def test_the_usual_command_reads_it(copy: Path, needs: Callable[..., None]) -> None:
    needs("xxh128sum")
    command = ["xxh128sum", "--check", "--strict", "--quiet", NAME]
    assert subprocess.run(command, cwd=copy, check=False).returncode == 0
    flip(sorted(copy.glob("*.safetensors"))[0], -1)
    assert subprocess.run(command, cwd=copy, check=False, capture_output=True).returncode == 1


def test_the_command_verifies_exports(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(copy)]) == 0
    assert capsys.readouterr().out == f"{copy}: whole\n"
    flip(copy / "config.json", 3)
    assert main(["verify", str(copy)]) == 78
    assert capsys.readouterr().out.endswith(f"{copy}: 1 fault\n")
    assert main(["verify", str(copy), "--json"]) == 78
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["faults"] == checksum_faults(copy) != []
    (copy / NAME).unlink()
    assert main(["verify", str(copy)]) == 78
    assert f"no {NAME}; only exports of `lightscale export` have hashes" in capsys.readouterr().err


def test_the_command_verifies_runs(saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(saved_runs / "tnl", tmp_path / "run"))
    (step,) = {int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("step-*")}
    for name in (str(run), f"{run}@{step}"):
        assert main(["verify", name]) == 0
        assert capsys.readouterr().out.endswith("intact\n")
    flip(next((run / "checkpoints").rglob("*.safetensors")), -1)
    assert main(["verify", str(run)]) == 1
    assert "expected xxh3-128" in capsys.readouterr().out


def test_the_command_verifies_stores(saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.txt").write_text("the other text\n" * 40)
    words = ["data", "prepare", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "store")]
    assert main([*words, "--tokenizer", str(saved_runs / "tnl"), "--validation", "0"]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "store")]) == 0
    assert "whole" in capsys.readouterr().out
    chunks = (path for path in (tmp_path / "store").rglob("*") if "/c/" in str(path))
    shard = max(chunks, key=lambda path: path.stat().st_size)
    flip(shard, 0)
    assert main(["verify", str(tmp_path / "store")]) == 78
    assert str(shard.parent.parent) in capsys.readouterr().out


def test_other_paths_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 78
    assert f"{tmp_path}: expected an export with {NAME}, a token store or a run" in capsys.readouterr().err
