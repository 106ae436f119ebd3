"""`lightscale doctor --warm`: the cache of a node is filled for a GPU that is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightscale import cli
from lightscale.errors import UserError
from lightscale.launch.doctor.warm import architecture

TWICE = """
import sys
from lightscale import cli
words = ["doctor", "--warm", *sys.argv[1:], "--arch", "sm_90", "--json"]
print("[")
assert cli.main(words) == 0
print(",")
assert cli.main(words) == 0
print("]")
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_cache_is_filled_once(tmp_path: Path) -> None:
    # The tests' processes interpret kernels.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", TWICE, "llama-tiny", "parallel.sequence=2", "model.num_layers=1"]
    done = subprocess.run(
        command, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    # Norm and gated linear unit forward and backward, and the loss.
    assert first["kernels"] >= 6
    # Without and with gradients; not one for each of the lengths, ranks, documents and layers.
    assert first["kernels"] <= first["variants"] <= 3 * first["kernels"]
    assert (first["compiled"], first["from_cache"], first["failed"]) == (first["variants"], 0, {})
    assert (second["compiled"], second["from_cache"], second["failed"]) == (0, first["variants"], {})
    assert len(list(tmp_path.glob("*/*.cubin"))) == first["variants"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--warm"], "--warm: no configuration; name CONFIG"),
        (["--arch", "sm_90"], "only --warm compiles kernels; add --warm"),
        (["--warm", "tnl-tiny", "--arch", "sm_90"], "TRITON_INTERPRET = 1: Triton compiles nothing; unset it"),
    ],
)
def test_wrong_words(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", *words]) == UserError.EXIT_CODE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hopper", "90", "sm_", "sm_9x"])
def test_unknown_architectures(name: str) -> None:
    with pytest.raises(UserError, match=f"--arch {name}: unknown architecture"):
        architecture(name)


def test_a_machine_without_a_gpu_needs_the_name() -> None:
    with pytest.raises(UserError, match="no GPU on this machine"):
        architecture(None)
