"""What `lightscale plan --nodes` prints."""

import shlex
import shutil
from pathlib import Path

import pytest

from lightscale import cli
from lightscale.config.files import load


def test_overrides_are_one_line_to_paste(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However narrow the terminal and however long the path."""
    far = tmp_path / ("a folder with a long name " * 4) / "tiny-run.toml"
    far.parent.mkdir()
    shutil.copy(tiny_run, far)
    assert cli.main(["plan", str(far), "--nodes", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    path, *overrides = shlex.split(lines[lines.index("Overrides for this layout:") + 1])
    assert path == str(far)
    keys = {"parallel.tensor", "parallel.pipeline", "parallel.sequence", "train.recompute", "train.global_batch_size"}
    assert keys <= {override.partition("=")[0] for override in overrides}
    load(far, overrides)
