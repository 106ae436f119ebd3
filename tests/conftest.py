"""What all tests share."""

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightscale.config.files import load
from lightscale.config.schema import RunConfig

# One thread per process: tests run several ranks on two cores, and sums must not depend on the number of
# threads. Read by torch when it is imported, and by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of a user who trains on several hosts: ranks of tests would ask each other for it.
os.environ.pop("LIGHTSCALE_RENDEZVOUS_KEY", None)

# A shell starts what it puts into the background with Ctrl-C ignored; all processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `make bundle` brings none, and tests of GPUs need none.
if find_spec("hypothesis") is not None:
    import hypothesis

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
    # transformers copies the code of exports below the home directory, and reads another place when it is imported.
    copied_code = tempfile.TemporaryDirectory(prefix="hf-modules-")
    config.add_cleanup(copied_code.cleanup)
    os.environ.update(HF_MODULES_CACHE=copied_code.name, HF_HUB_OFFLINE="1")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(config))
        _choose_seed(config)
    if config.option.skipped:
        # Only files that have one of them: others need not be imported.
        files = {config.rootpath / name.partition("::")[0] for name in _skipped_before(config)}
        config.args = [str(path) for path in sorted(files) if path.exists()]


# ----- what tests need of the machine, beside what README names -------------------------------------------------------

# Where programs are: those of the environment, and those for root, whatever PATH has.
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin:/sbin"])
# The package of Debian that has a program, where its name is another.
PACKAGES = {
    "cc": "gcc",
    "chattr": "e2fsprogs",
    "fsfreeze": "util-linux",
    "ip": "iproute2",
    "mkfs.ext4": "e2fsprogs",
    "mpiexec": "mpich",
    "prlimit": "util-linux",
    "tc": "iproute2",
    "unshare": "util-linux",
    "xxh128sum": "xxhash",
    **dict.fromkeys(("munged", "slurmctld", "slurmd"), "slurm-wlm"),
    **dict.fromkeys(("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo"), "slurm-wlm"),
}


def _has_terminals() -> bool:
    try:
        ends = os.openpty()
    except OSError:
        return False
    for end in ends:
        os.close(end)
    return True


def _succeeds(*command: str) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def _can_mount(*options: str) -> bool:
    """Tried where nobody sees it."""
    return _succeeds("unshare", "--mount", *options, "mount", "-t", "tmpfs", "tmpfs", "/mnt")


# What no package brings.
CONDITIONS: dict[str, Callable[[], bool]] = {
    "root": lambda: os.geteuid() == 0,
    "root that may mount": lambda: os.geteuid() == 0 and _can_mount(),
    "mounts of one's own": lambda: _can_mount("--map-root-user"),
    "processes that may be traced": lambda: _succeeds("strace", "-o", os.devnull, "true"),
    "pseudo-terminals": _has_terminals,
}


@cache
def _is_there(need: str) -> bool:
    return CONDITIONS[need]() if need in CONDITIONS else shutil.which(need, path=PROGRAMS) is not None


class Missing(pytest.skip.Exception):  # type: ignore[name-defined]
    """Skips a test, for want of what the machine lacks: packages and conditions."""

    __module__ = "builtins"  # as pytest's own, so that reports begin with the name alone

    def __init__(self, missing: list[str]) -> None:
        packages = [name for name in missing if name not in CONDITIONS]
        remedy = f" (Debian: apt-get install {' '.join(packages)})" if packages else ""
        super().__init__(f"{', '.join(missing)}{remedy}")
        self.missing = missing


@pytest.fixture(scope="session")
def needs() -> Callable[..., None]:
    """`needs("zsh", "root")`: programs and `CONDITIONS`; where one is not there, the test is skipped for want of it.

    The session names them at its end, and `--skipped` runs those tests again.
    """

    def needs(*names: str) -> None:
        missing = [PACKAGES.get(name, name) for name in names if not _is_there(name)]
        if missing:
            raise Missing(list(dict.fromkeys(missing)))

    return needs


SKIPPED = "lightscale/skipped"  # in pytest's cache: what the tests that were skipped lack, by their names


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skipped", action="store_true", help="only the tests that were skipped for want of what the machine lacked"
    )
    parser.addoption(
        "--share", type=int, default=1, metavar="N", help="one in N of the tests of each file, drawn with the seed"
    )


# First come those that mostly wait, for schedulers, for hosts that are gone, for the jobs of a tutorial, so that others
# run beside them; then the longest files, so that no worker ends with one alone.
FIRST = (
    *("tests/launch/slurm", "tests/docs/test_tutorials.py", "tests/launch"),
    *("tests/tools/test_fuzz_layouts.py", "tests/docs/test_site.py", "tests/training", "tests/models"),
    *("tests/parallel/test_parity.py", "tests/parallel/test_plain_oracle.py"),
)
# Of tests/helpers/drawing.py. Workers inherit it.
SEED, LAST_SEED = "LIGHTSCALE_TEST_SEED", "lightscale/seed"


def _cache(config: pytest.Config) -> pytest.Cache | None:
    """What is kept between sessions; None with ``-p no:cacheprovider``."""
    return getattr(config, "cache", None)


def _choose_seed(config: pytest.Config) -> None:
    """That of the session before where its tests are run again, else a new one."""
    cache = _cache(config)
    again = config.option.skipped or getattr(config.option, "lf", False)
    seed = (cache and again and cache.get(LAST_SEED, None)) or str(random.SystemRandom().randrange(10**6))
    os.environ.setdefault(SEED, seed)
    if cache is not None:
        cache.set(LAST_SEED, os.environ[SEED])


def pytest_report_header() -> str:
    return f"cases drawn with {SEED}={os.environ[SEED]}"


def _skipped_before(config: pytest.Config) -> dict[str, list[str]]:
    cache = _cache(config)
    skipped: dict[str, list[str]] = {} if cache is None else cache.get(SKIPPED, {})
    return skipped


@pytest.hookimpl(trylast=True)  # of those that markers leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave those of `--skipped` and `--share`, in the order of `FIRST`."""
    kept = sorted(items, key=_place)
    if config.option.skipped:
        skipped = _skipped_before(config)
        kept = [item for item in kept if item.nodeid in skipped]
    if config.option.share > 1 and os.environ[SEED] != "all":
        kept = _share(kept, config.option.share)
    left_out = set(items).difference(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = kept


def _place(item: pytest.Item) -> int:
    """Of a test's folder in `FIRST`; behind all of them where it has none. xdist keeps it if told to."""
    path = item.path.relative_to(ROOT)
    return next((place for place, one in enumerate(FIRST) if path.is_relative_to(one)), len(FIRST))


def _share(items: list[pytest.Item], share: int) -> list[pytest.Item]:
    """One in `share` of each file's tests: all have run after `share` sessions, or a few more."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kept = []
    for path, own in files.items():
        first = random.Random(f"{os.environ[SEED]} {path.relative_to(ROOT)}").randrange(share)
        kept += own[first::share]
    return kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, Missing):
        report.user_properties += [("missing", name) for name in call.excinfo.value.missing]
    return report


class Skips:
    """Notes in the main process what tests were skipped for want of."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ran: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        missing = [str(name) for key, name in report.user_properties if key == "missing"]
        self._ran.setdefault(report.nodeid, []).extend(missing)

    def pytest_sessionfinish(self) -> None:
        cache = _cache(self._config)
        if cache is None:
            return
        known = {**_skipped_before(self._config), **self._ran}
        cache.set(SKIPPED, {name: missing for name, missing in known.items() if missing})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts = Counter(name for missing in self._ran.values() for name in missing)
        if counts:
            terminalreporter.section("skipped for want of")
            for name, number in sorted(counts.items()):
                terminalreporter.line(f"{name}: {number} {'test' if number == 1 else 'tests'}")


# ----- fixtures -------------------------------------------------------------------------------------------------------


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
def make_disk(tmp_path: Path, needs: Callable[..., None]) -> Iterator[Callable[[int], Path]]:
    """`make_disk(size_bytes)`: an empty file system of that size."""
    needs("root that may mount")
    mounted: list[Path] = []

    def make_disk(size_bytes: int) -> Path:
        directory = tmp_path / f"disk-{len(mounted)}"
        directory.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory)], check=True)
        mounted.append(directory)
        return directory

    yield make_disk
    for directory in mounted:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.fixture
def small_disk(make_disk: Callable[[int], Path]) -> Path:
    """An empty file system of 64 MiB."""
    return make_disk(64 << 20)
