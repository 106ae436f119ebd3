"""Whatever stops a preparation, and whoever resumes it: the same command gives the same store, byte for byte."""

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightscale.data_pipeline.preparation import assemble
from lightscale.data_pipeline.preparation.corpus import load_corpus
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.errors import UserError

UNIT_BYTES = 2000

CORPUS = """
tokenizer = "own"
validation = 0.1
shard_tokens = 4096
chunk_tokens = 64

[sources.lines]
paths = ["lines.jsonl"]
language = "other"
filters = {size = {min = 3}}
weight = 0.5

[sources.texts]
paths = ["texts"]
weight = 0.5
"""


def make_corpus(directory: Path, tokenizer: TiktokenTokenizer, random_texts: Callable[..., list[str]]) -> Path:
    texts = random_texts(60, seed=7, max_words=120)
    (directory / "own/tokenizer").mkdir(parents=True)
    tokenizer.save(directory / "own/tokenizer")
    lines = [{"text": text + " " + "words of every day"} for text in texts[:40] + texts[5:10]]
    (directory / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "texts").mkdir()
    for number, text in enumerate(texts[40:] + texts[50:55]):
        (directory / "texts" / f"{number:02}.txt").write_text(text)
    (directory / "corpus.toml").write_text(CORPUS)
    return directory / "corpus.toml"


@pytest.fixture
def corpus(tmp_path: Path, byte_tokenizer: TiktokenTokenizer, random_texts: Callable[..., list[str]]) -> Path:
    """A corpus file of two sources, with duplicates in and between them."""
    return make_corpus(tmp_path, byte_tokenizer, random_texts)


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: TiktokenTokenizer, random_texts: Callable[..., list[str]]
) -> Path:
    """The store of a preparation that nothing stopped, of a copy of the corpus elsewhere: paths leave no trace."""
    directory = tmp_path_factory.mktemp("whole")
    corpus = load_corpus(make_corpus(directory, byte_tokenizer, random_texts))
    report = prepare(corpus, directory / "store", PrepareOptions(unit_bytes=UNIT_BYTES))
    assert report["units"] > 8
    for source in ("lines", "texts"):
        assert report["corpus"][source]["stages"]["deduplicate"]["dropped"]["exact duplicate"]["documents"] > 1
    return directory / "store"


def contents(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


KILL_YOURSELF = """
    import os, random, signal, sys
    from pathlib import Path
    from lightscale.data_pipeline.preparation.corpus import load_corpus
    from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare

    corpus, out, generator = load_corpus(Path(sys.argv[1])), Path(sys.argv[2]), random.Random(int(sys.argv[3]))
    attempts = 0
    while True:
        attempts += 1
        assert attempts < 200
        if (child := os.fork()) == 0:
            left, before = generator.randint(1, 500), generator.random() < 0.5

            def deadly(call):
                def wrapped(*args, **kwargs):
                    global left
                    left -= 1
                    if left == 0 and before:
                        os.kill(os.getpid(), signal.SIGKILL)
                    try:
                        call(*args, **kwargs)
                    finally:
                        if left == 0:
                            os.kill(os.getpid(), signal.SIGKILL)
                return wrapped

            os.rename, os.replace, os.fsync, os.unlink, os.mkdir = map(
                deadly, (os.rename, os.replace, os.fsync, os.unlink, os.mkdir)
            )
            prepare(corpus, out, PrepareOptions(unit_bytes=int(sys.argv[4])))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        generator.random()
    print(attempts)
"""


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_any_change_of_a_file_it_goes_on(corpus: Path, whole: Path, tmp_path: Path, seed: int) -> None:
    """Each attempt is killed (SIGKILL) before or after its n-th rename, sync, removal or new directory."""
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(KILL_YOURSELF),
        corpus,
        tmp_path / "store",
        str(seed),
        str(UNIT_BYTES),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) > 3
    assert contents(tmp_path / "store") == contents(whole)
    assert not (tmp_path / "store.work").exists()


def command_line(corpus: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "lightscale", "data", "prepare", str(corpus), "--out", str(out), *options]


def kill_when(command: list[str], is_time: Callable[[], bool]) -> bool:
    """Start ``command`` and kill it (SIGKILL) as soon as ``is_time``; False where it finished before."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not is_time():
        time.sleep(0.002)
    process.kill()
    return process.wait() == -signal.SIGKILL


def finished_units(out: Path) -> dict[str, int]:
    """Name and time of what is finished in the work directory."""
    units = out.with_name(f"{out.name}.work") / "units"
    return {path.name: path.stat().st_mtime_ns for path in units.glob("??????")} if units.exists() else {}


@pytest.mark.long
def test_the_command_with_workers_goes_on_where_it_was_killed(corpus: Path, tmp_path: Path) -> None:
    with (tmp_path / "lines.jsonl").open("a") as lines:  # large enough for four units of the command's own choice
        for number in range(6000):
            text = f"{number} " + " ".join(str(number * factor) for factor in range(99))
            lines.write(json.dumps({"text": text}) + "\n")
    prepare(load_corpus(corpus), tmp_path / "whole")
    out = tmp_path / "store"
    assert kill_when(command_line(corpus, out, "--workers", "2"), lambda: len(finished_units(out)) > 0)
    assert not out.exists()
    before = finished_units(out)
    killed = kill_when(command_line(corpus, out, "--workers", "2"), lambda: len(finished_units(out)) > len(before))
    assert killed
    assert finished_units(out).items() > before.items(), "finished work was done again"
    finished = subprocess.run(command_line(corpus, out, "--json"), capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert contents(out) == contents(tmp_path / "whole")


MPIEXEC = Path(sys.executable).with_name("mpiexec")


@pytest.fixture
def mpiexec(needs: Callable[..., None]) -> str:
    """The program, of the package mpich or of the machine."""
    pytest.importorskip("mpi4py")
    needs("mpiexec")
    return str(MPIEXEC) if MPIEXEC.exists() else "mpiexec"


@pytest.mark.parametrize(
    "ranks", [1, 2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
)
def test_mpi_ranks_make_the_same_store(corpus: Path, tmp_path: Path, mpiexec: str, ranks: int) -> None:
    prepare(load_corpus(corpus), tmp_path / "whole")
    command = [mpiexec, "-n", str(ranks), *command_line(corpus, tmp_path / "store", "--mpi", "--json")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert finished.returncode == 0, finished.stderr
    # One rank speaks, beside what mpiexec has to say on machines without its hosts' network.
    (spoken,) = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    assert json.loads(spoken)["store"] == str(tmp_path / "store")
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert again.returncode != 0
    assert again.stderr.count("never overwritten") == 1


DRIVER = """
import contextlib, functools, sys
from pathlib import Path
from lightscale.data_pipeline.executors import ProcessPool, mpi
from lightscale.data_pipeline.executors.ray_cluster import RayCluster
from lightscale.data_pipeline.preparation import units
from lightscale.data_pipeline.preparation.corpus import load_corpus
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare

# Also in workers, but for Ray's: they run this file.
clean_documents = units.clean_documents


def noted(context, unit, *others, **options):
    with open(sys.argv[3] + ".begun", "a") as log:
        log.write(f"{unit.number}\\n")
    return clean_documents(context, unit, *others, **options)


units.clean_documents = noted
ENGINES = {
    "processes": lambda: contextlib.nullcontext(functools.partial(ProcessPool, num_workers=2)),
    "mpi": mpi.ranks,
    "ray": lambda: contextlib.nullcontext(RayCluster),
}
if __name__ == "__main__":
    with ENGINES[sys.argv[1]]() as make_executor:
        if make_executor is not None:
            options = PrepareOptions(unit_bytes=int(sys.argv[4]), make_executor=make_executor)
            prepare(load_corpus(Path(sys.argv[2])), Path(sys.argv[3]), options)
"""


CLUSTER = "LIGHTSCALE_TEST_CLUSTER"


def workers_of(engine: str, driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Processes that do tasks."""
    found = []
    processes = psutil.process_iter() if engine == "ray" else psutil.Process(driver.pid).children(recursive=True)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            is_worker = {
                "processes": lambda line=line: "spawn_main" in line,
                "mpi": lambda line=line, one=process: "driver.py" in line and one.environ().get("PMI_RANK", "0") != "0",
                # Named after what they run; of this cluster, and of no other on the machine.
                "ray": lambda line=line, one=process: (
                    line.startswith("ray::") and "IDLE" not in line and one.environ().get(CLUSTER) == str(os.getpid())
                ),
            }[engine]
            if is_worker():
                found.append(process)
    return found


def count_kills(engine: str, driver: subprocess.Popen[bytes], begun: Path, generator: random.Random, most: int) -> int:
    """Kill workers at random instants until the driver ends, from the first unit on that it lets begin; how many."""
    kills = 0
    wait_until = 0.0
    begun_before = num_bytes(begun)
    while driver.poll() is None:
        # Ray's workers are no children: all processes of the machine are looked at, which takes a while.
        time.sleep(0.2 if engine == "ray" else 0.01)
        # Not while they start: nothing would be lost. (Ray's have the names of their tasks only then.)
        if engine != "ray" and num_bytes(begun) == begun_before:
            continue
        if kills == most or time.monotonic() < wait_until or not (workers := workers_of(engine, driver)):
            continue
        if wait_until:
            with contextlib.suppress(psutil.Error):
                generator.choice(workers).kill()
                kills += 1
        wait_until = time.monotonic() + generator.uniform(0, 0.4)
    return kills


def num_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kills_until_done(
    engine: str, command: list[str], begun: Path, generator: random.Random, most: int
) -> tuple[int, int]:
    """Run until the store is there; kills of workers, and starts of the command."""
    kills = starts = 0
    while True:
        starts += 1
        assert starts <= most + 1
        # Not a pipe, which nobody reads before the end: who writes much into it would wait for ever.
        with tempfile.TemporaryFile() as output:
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output) as driver:
                kills_before = kills
                kills += count_kills(engine, driver, begun, generator, most - kills)
            output.seek(0)
            errors = output.read().decode()
        if driver.returncode == 0:
            return kills, starts
        # Where a rank dies MPI ends the job.
        assert engine == "mpi" and kills > kills_before, errors


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray cluster of two nodes on this machine."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # What its workers inherit.
        patch.setenv(CLUSTER, str(os.getpid()))
        cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
        cluster.add_node(**options)
        yield cluster.address
        cluster.shutdown()


def most_kills(count: int, *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(engine, count, marks=marks) for engine in ("processes", "mpi")] + [
        pytest.param("ray", count, marks=marks if count > 3 else [pytest.mark.long, pytest.mark.timeout(400)])
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "most"), [*most_kills(2), *most_kills(20, pytest.mark.soak, pytest.mark.timeout(1800))]
)
def test_workers_killed_at_random_instants_leave_no_trace(
    corpus: Path,
    tmp_path: Path,
    engine: str,
    most: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others do their tasks; where MPI ends the job, the next goes on, and loses at most what was in hand."""
    with (tmp_path / "lines.jsonl").open("a") as lines:
        for number in range(1000):
            lines.write(json.dumps({"text": " ".join(str(number * factor) for factor in range(99))}) + "\n")
    unit_bytes = 5000
    num_units = prepare(load_corpus(corpus), tmp_path / "whole", PrepareOptions(unit_bytes=unit_bytes))["units"]
    expected = contents(tmp_path / "whole")
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py"), engine, str(corpus), "{out}", str(unit_bytes)]
    if engine == "mpi":
        command = [request.getfixturevalue("mpiexec"), "-n", "3", *command]
    elif engine == "ray":
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("ray_address"))
    generator = random.Random(most)
    kills = starts = stores = again = 0
    while kills < most:
        out = tmp_path / f"store-{stores}"
        here = [str(out) if part == "{out}" else part for part in command]
        begun_log = Path(f"{out}.begun")
        found, started = kills_until_done(engine, here, begun_log, generator, min(most - kills, 4))
        kills, starts, stores = kills + found, starts + started, stores + 1
        assert contents(out) == expected
        assert not out.with_name(f"{out.name}.work").exists()
        if engine != "ray":
            # Two workers: a kill loses what both have in hand at most, where MPI ends the job or the pool is a new one.
            begun = begun_log.read_text().split()
            again += len(begun) - len(set(begun))
            assert len(set(begun)) == num_units
            assert len(begun) - num_units <= 2 * found
    figures: dict[str, Any] = {"engine": engine, "kills": kills, "starts": starts, "units": num_units}
    if engine != "ray":
        figures["units begun again"] = again
    print(json.dumps(figures | {"stores": stores, "identical": stores}))


@pytest.fixture
def interrupted(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store whose preparation stopped before its shards were written."""

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(assemble, "write_shard", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(load_corpus(corpus), tmp_path / "store", PrepareOptions(unit_bytes=UNIT_BYTES))
    assert finished_units(tmp_path / "store")
    return tmp_path / "store"


def resume(corpus: Path, out: Path, **options: Any) -> dict[str, Any]:
    return prepare(load_corpus(corpus), out, PrepareOptions(unit_bytes=UNIT_BYTES, **options))


def test_another_corpus_is_refused_by_key_until_restart(corpus: Path, interrupted: Path) -> None:
    corpus.write_text(CORPUS.replace("validation = 0.1", "validation = 0.2").replace("min = 3", "min = 4"))
    before = finished_units(interrupted)
    with pytest.raises(UserError, match="holds part of a different store") as caught:
        resume(corpus, interrupted)
    assert "corpus.validation: 0.1 → 0.2" in str(caught.value)
    assert "corpus.sources.lines.filters.size.min: 3 → 4" in str(caught.value)
    assert "--restart" in str(caught.value)
    assert finished_units(interrupted) == before
    resume(corpus, interrupted, restart=True)
    assert TokenStore(interrupted).weights == {"lines": 0.5, "texts": 0.5}
    assert not interrupted.with_name("store.work").exists()


def test_another_version_of_the_pipeline_is_refused(
    corpus: Path, interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightscale.data_pipeline.preparation.prepare.PIPELINE_VERSION", 9_999)
    with pytest.raises(UserError, match=r"\(versions\.pipeline: \d+ → 9999\); use the earlier versions to finish"):
        resume(corpus, interrupted)


def test_another_tokenizer_or_other_files_are_refused(corpus: Path, interrupted: Path, tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    other = TiktokenTokenizer(name="other", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300})
    other.save(tmp_path / "own/tokenizer")
    (tmp_path / "texts/00.txt").write_text("changed")
    with pytest.raises(UserError, match="holds part of a different store") as caught:
        resume(corpus, interrupted)
    assert "tokenizer: " in str(caught.value)
    assert "files: " in str(caught.value)


def test_finished_units_are_not_done_again(
    corpus: Path, interrupted: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        pytest.fail("a unit was done again")

    monkeypatch.setattr("lightscale.data_pipeline.preparation.units.clean_documents", refuse)
    resume(corpus, interrupted)
    assert contents(interrupted) == contents(whole)


@pytest.mark.parametrize("lost", ["tokens", "hashes/tokens"])
def test_shards_that_a_power_failure_took_are_written_again(
    corpus: Path, whole: Path, interrupted: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Their records are in another directory, which may have reached the disk before."""

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("lightscale.data_pipeline.preparation.prepare.publish", stop)
        with pytest.raises(KeyboardInterrupt):
            resume(corpus, interrupted)
    shards = [path for path in interrupted.with_name("store.work").glob(f"store/*/{lost}/c") if path.is_dir()]
    assert shards
    for path in shards:
        shutil.rmtree(path)
    resume(corpus, interrupted)
    assert contents(interrupted) == contents(whole)


def test_stopped_while_tidying_up_it_only_tidies_up(
    corpus: Path, whole: Path, interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = interrupted.with_name("store.work")

    def stop(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            resume(corpus, interrupted)
    assert contents(interrupted) == contents(whole)
    assert (work / "units").exists()
    assert resume(corpus, interrupted) == TokenStore(interrupted).report()
    assert not work.exists()
    assert contents(interrupted) == contents(whole)


def test_two_preparations_of_one_store_keep_out_of_each_others_way(corpus: Path, interrupted: Path) -> None:
    with (interrupted.with_name("store.work") / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"store\.work: another process is preparing this store"):
            resume(corpus, interrupted, restart=True)
    assert finished_units(interrupted)


def test_files_of_another_origin_are_never_touched(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "store.work").mkdir()
    (tmp_path / "store.work" / "thesis.txt").write_text("years of work")
    for restart in (False, True):
        with pytest.raises(UserError, match=r"store\.work: .* contains thesis\.txt; move that file"):
            resume(corpus, tmp_path / "store", restart=restart)
    assert [path.name for path in (tmp_path / "store.work").iterdir()] == ["thesis.txt"]


def test_a_path_taken_while_working_is_left_alone(corpus: Path, interrupted: Path) -> None:
    interrupted.write_text("somebody else's")
    with pytest.raises(UserError, match="never overwritten"):
        resume(corpus, interrupted)
    assert interrupted.read_text() == "somebody else's"


@pytest.fixture
def tiny_disk(make_disk: Callable[[int], Path]) -> Path:
    """A file system with room for 2 MiB."""
    return make_disk(2 << 20)


def test_a_full_disk_is_one_clear_error_and_the_work_goes_on_with_more_room(
    corpus: Path, whole: Path, tiny_disk: Path
) -> None:
    ballast, out = tiny_disk / "ballast", tiny_disk / "store"
    free = shutil.disk_usage(tiny_disk).free
    messages = []
    for room in range(8_000, 1_200_000, 120_000):
        work = sum(path.stat().st_blocks * 512 for path in tiny_disk.rglob("*") if path.is_file() and path != ballast)
        ballast.write_bytes(bytes(max(free - work - room, 0)))
        try:
            resume(corpus, out)
        except UserError as error:
            messages.append(str(error))
            assert not out.exists()
        else:
            break
        finally:
            ballast.unlink()
    assert len(messages) > 1
    for message in messages:
        assert "cannot write (No space left on device)" in message
        assert "run the same command again" in message
    assert contents(out) == contents(whole)
