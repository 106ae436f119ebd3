"""README.md: short, and its commands from own text to a shared model run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCK = re.search(r"```bash\n(.*?)```", README, re.DOTALL)
# An environment that is active, a server until Ctrl-C, an installation from an index, and an account.
NOT_HERE = ("source ", "lightscale monitor ", "pip install ", "hf upload ")


def test_at_most_130_lines() -> None:
    assert README.count("\n") <= 130


@pytest.mark.long
@pytest.mark.timeout(900)
def test_from_own_text_to_transformers(tmp_path: Path) -> None:
    assert BLOCK is not None
    (tmp_path / "my-texts").mkdir()
    for name, text in topics.items():
        (tmp_path / "my-texts" / f"{name}.txt").write_text(text, "utf-8")
    lines = BLOCK[1].splitlines()
    script = "\n".join(line for line in lines if not line.startswith(NOT_HERE))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "finished at step 280" in ran.stderr
    assert "'generated_text': 'The " in ran.stdout
