"""Where Triton keeps what it compiles for a user whose home directory cannot be written."""

import os
import tempfile
from pathlib import Path

import pytest

from lightscale.kernels.common.triton.cache import provide_cache


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files; nothing else is said of the cache, and there is no home directory."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    (tmp_path / "file").touch(mode=0o600)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    # Both are as before at the end, whatever is set meanwhile.
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return folder


def test_triton_finds_the_other_folder(place: Path) -> None:
    from triton import knobs

    provide_cache()
    assert knobs.cache.dir == str(place / f"triton-{os.getuid()}")
    assert Path(knobs.cache.dir).stat().st_mode & 0o777 == 0o700
    provide_cache()
    assert len(list(place.iterdir())) == 1


@pytest.mark.parametrize("taken", ["link", "writable by all"])
def test_a_folder_that_others_can_write_is_not_used(place: Path, tmp_path: Path, taken: str) -> None:
    name = place / f"triton-{os.getuid()}"
    if taken == "link":
        (tmp_path / "other").mkdir()
        name.symlink_to(tmp_path / "other")
    else:
        name.mkdir()
        name.chmod(0o777)
    provide_cache()
    found = Path(os.environ["TRITON_CACHE_DIR"])
    assert found.parent == place and found != name
    assert found.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME", "HOME"])
def test_what_is_said_or_can_be_written_stays(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    before = dict(os.environ)
    provide_cache()
    assert dict(os.environ) == before
    assert list(place.iterdir()) == []
