"""What the bare machine takes over from this one, and what it refuses; the machine itself takes minutes and root."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def tools(tools_path: Path) -> None:
    """So that the tool can be imported."""


def test_what_is_missing_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import bare_machine

    monkeypatch.setattr("os.geteuid", lambda: 0)
    there = [name for name in bare_machine.PROGRAMS if name not in ("debootstrap", "unshare")]
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    assert bare_machine.main(["--folder", str(tmp_path / "bare")]) == 2
    said = capsys.readouterr().err
    assert said == "error: missing: debootstrap, unshare; install with: apt-get install debootstrap util-linux\n"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert bare_machine.main(["--folder", str(tmp_path / "bare")]) == 2
    assert "root is needed to create a system in a folder: run this with sudo" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        bare_machine.main(["--keep"])
    assert "--keep and --again need --folder" in capsys.readouterr().err
    assert not (tmp_path / "bare").exists()


def test_settings_of_pip_and_the_files_that_they_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import bare_machine

    (tmp_path / "index" / "simple").mkdir(parents=True)
    (tmp_path / "limits.txt").touch()
    (tmp_path / "pip.conf").write_text(
        f"[global]\nindex-url = https://index.invalid/simple\nextra-index-url = file://{tmp_path}/index/simple\n"
        f"constraint = {tmp_path}/limits.txt\nfind-links = {tmp_path}/none\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_TIMEOUT", "99")
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    settings = bare_machine._pip_settings()
    wanted = {
        "PIP_INDEX_URL": "https://index.invalid/simple",
        "PIP_EXTRA_INDEX_URL": f"file://{tmp_path}/index/simple",
        "PIP_CONSTRAINT": f"{tmp_path}/limits.txt",
        "PIP_TIMEOUT": "99",
        "https_proxy": "http://proxy.invalid:3128",
    }
    assert {name: settings.get(name) for name in wanted} == wanted
    paths = [path for path in bare_machine._local_paths(settings) if path.is_relative_to(tmp_path)]
    # The index with the files beside it; what is not there cannot be mounted.
    assert paths == [tmp_path / "index", tmp_path / "limits.txt", tmp_path / "pip.conf"]


def test_the_tracked_files_are_copied_as_they_lie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, needs: Callable[..., None]
) -> None:
    import bare_machine

    needs("git")
    source, system = tmp_path / "source", tmp_path / "system"
    (source / "folder").mkdir(parents=True)
    (source / "folder" / "a b").write_text("old")
    (source / "link").symlink_to("folder")
    (source / "untracked").touch()
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "folder", "link"], ["commit", "--quiet", "--message=a"]):
        subprocess.run([*git, *words], check=True)
    (source / "folder" / "a b").write_text("new")
    monkeypatch.setattr(bare_machine, "ROOT", source)
    bare_machine._copy_tree(system, "root")
    tree = system / bare_machine.TREE
    assert (tree / "folder" / "a b").read_text() == "new"
    assert (tree / "link").readlink() == Path("folder")
    assert sorted(path.name for path in tree.iterdir()) == ["folder", "link"]


def test_it_needs_nothing_that_is_installed() -> None:
    """Only Python itself: no site-packages."""
    import bare_machine

    command = [sys.executable, "-I", "-S", bare_machine.__file__, "--help"]
    assert "--suite" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
