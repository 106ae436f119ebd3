"""What all tests share."""

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from lightscale.config.files import load
from lightscale.config.schema import RunConfig

# One thread per process: tests run several ranks on two cores, and sums must not depend on the number of
# threads. Read by torch when it is imported, and by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what it puts into the background with Ctrl-C ignored; all processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that others use too is slow at times; that is no failure.
hypothesis.settings.register_profile(
    "lightscale", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("lightscale")

ROOT = Path(__file__).resolve().parents[1]

TINY_RUN = f"""
extends = ["{ROOT}/configs/arch/tnl.toml", "{ROOT}/configs/size/tiny.toml"]

[model]
vocab_size = 512

[data]
store = "store"
sequence_length = 64

[optimizer]
lr = 1e-3

[train]
steps = 4
global_batch_size = 4
"""


def pytest_configure(config: pytest.Config) -> None:
    """All but the tests marked `gpu` run on CPUs, also where there is a GPU: hide it before torch is imported."""
    if "not gpu" in config.option.markexpr or "gpu" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Kernels run in Triton's interpreter there. It reads this when a kernel is defined.
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_run_text() -> str:
    """A TNL of 4 layers, width 64, 4 heads, vocabulary 512; 4 steps of 4 x 64."""
    return TINY_RUN


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_run_text: str) -> Path:
    """A file in `tmp_path` with `tiny_run_text`."""
    path = tmp_path / "tiny-run.toml"
    path.write_text(tiny_run_text, encoding="utf-8")
    return path


@pytest.fixture
def tiny_config(tiny_run: Path) -> Callable[..., RunConfig]:
    """`tiny_config("train.steps=2", …)`: the configuration in `tiny_run` with overrides."""
    return lambda *overrides: load(tiny_run, overrides)


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """`run_ranks(function, world_size, *args, timeout_s=120)`: see tests/helpers/run_ranks.py."""
    spec = importlib.util.spec_from_file_location("lightscale_run_ranks", ROOT / "tests" / "helpers" / "run_ranks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., list[Any]] = module.run_ranks
    return function


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 64 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", f"size={64 << 20}", "tmpfs", str(directory)]
    allowed = mount is not None and os.geteuid() == 0
    if not allowed or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system can only be mounted by root, where mounting is allowed")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)
