"""SHA256SUMS: a changed bit of an export is detected, wherever it is, and by the usual command too."""

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
from lightscale.exchange.files.checksums import NAME, checksum_faults, require_unchanged

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
            assert fault.startswith(f"{path}: sha256 ")
            flip(path, byte)
    assert checksum_faults(copy) == []


def test_a_changed_weight_is_neither_loaded_nor_imported(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last byte of a file of tensors: nothing else can detect it."""
    shard = sorted(copy.glob("*.safetensors"))[1]
    lightscale.load(copy)
    flip(shard, -1)
    with pytest.raises(UserError, match=f"{shard}: sha256 .*, not .*\ncopy the files again, or remove {copy / NAME}"):
        lightscale.load(copy)
    assert main(["import", str(copy), "--run", str(tmp_path / "run")]) == 78
    assert f"{shard}: sha256" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (copy / NAME).unlink()
    lightscale.load(copy)


def test_the_model_card_may_be_edited(copy: Path) -> None:
    (copy / "README.md").write_text("Mine.\n")
    require_unchanged(copy)


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "tokenizer_config.json").unlink()
    (fault,) = checksum_faults(copy)
    assert fault == f"{copy / 'tokenizer_config.json'}: missing; {NAME} lists it"


@pytest.mark.parametrize("line", ["nothing", "0" * 64 + "  ../outside", "0" * 64 + "  /etc/passwd", "\xff" * 70])
def test_a_line_that_is_no_hash_of_a_file_here_is_refused(copy: Path, line: str) -> None:
    with (copy / NAME).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    number = len((copy / NAME).read_text().splitlines())
    with pytest.raises(UserError, match=f"{NAME}, line {number}: expected a sha256 hash"):
        require_unchanged(copy)


def test_sha256sum_reads_it(copy: Path, needs: Callable[..., None]) -> None:
    needs("sha256sum")
    command = ["sha256sum", "--check", "--strict", "--quiet", NAME]
    assert subprocess.run(command, cwd=copy, check=False).returncode == 0
    flip(sorted(copy.glob("*.safetensors"))[0], -1)
    assert subprocess.run(command, cwd=copy, check=False, capture_output=True).returncode == 1


def test_the_command_verifies_exports_runs_and_stores(
    copy: Path, saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One word for all; a path that is none of them is refused."""
    assert main(["verify", str(copy)]) == 0
    assert capsys.readouterr().out == f"{copy}: whole\n"
    flip(copy / "config.json", 3)
    assert main(["verify", str(copy), "--json"]) == 78
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["faults"] == checksum_faults(copy)
    assert main(["verify", str(saved_runs / "tnl")]) == 0
    assert "intact" in capsys.readouterr().out
    (copy / NAME).unlink()
    assert main(["verify", str(copy)]) == 78
    assert f"no {NAME}; only exports of `lightscale export` have hashes" in capsys.readouterr().err
    assert main(["verify", str(tmp_path)]) == 78
    assert f"{tmp_path}: expected an export with {NAME}, a token store or a run" in capsys.readouterr().err
