"""``lightscale data plan --hosts``: what it says of disk, opens and time, beside what a preparation then takes."""

import json
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightscale import cli
from lightscale.data_pipeline.preparation import deduplication, unit_parts
from lightscale.data_pipeline.preparation.corpus import load_corpus
from lightscale.data_pipeline.preparation.estimates import forecast as forecasts
from lightscale.data_pipeline.preparation.estimates.estimate import SourceEstimate, estimate
from lightscale.data_pipeline.preparation.estimates.forecast import StepForecast, forecast
from lightscale.data_pipeline.preparation.plan import read_plan
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.preparation.readers import streams
from lightscale.data_pipeline.preparation.readers.inputs import SourceFile
from lightscale.data_pipeline.preparation.readers.interface import InputFormat
from lightscale.data_pipeline.preparation.readers.table import FORMATS
from lightscale.data_pipeline.preparation.work_directory import WorkDirectory

TOML = """
tokenizer = "ascii"
shard_tokens = 65_536
chunk_tokens = 1024
{top}
[sources.a]
paths = ["src"]
{source}
"""


def write_files(folder: Path, num_files: int, documents: int, *, packed: bool) -> None:
    draw = random.Random(1)
    folder.mkdir()
    for number in range(num_files):
        texts = [" ".join(f"{draw.getrandbits(48):x}" for _ in range(draw.randint(20, 60))) for _ in range(documents)]
        lines = "".join(json.dumps({"text": text, "url": f"u{index:06}"}) + "\n" for index, text in enumerate(texts))
        if packed:
            packer = zlib.compressobj(wbits=31, memLevel=4)  # in small blocks: parts end where one does
            (folder / f"{number}.jsonl.gz").write_bytes(packer.compress(lines.encode()) + packer.flush())
        else:
            (folder / f"{number}.jsonl").write_text(lines)


@pytest.fixture(scope="module")
def opens() -> Iterator[Callable[[Path | None], int]]:
    """``opens(folder)``: count opens below it from now on; ``opens(None)``: how many there were."""
    state: dict[str, Any] = {"folder": "\0", "count": 0}

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(state["folder"]):
            state["count"] += 1

    def call(folder: Path | None) -> int:
        found: int = state["count"]
        state.update(folder=str(folder) if folder else "\0", count=0)
        return found

    sys.addaudithook(audit)
    yield call
    call(None)


def num_bytes(folder: Path, pattern: str = "**/*") -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())


@pytest.mark.long
@pytest.mark.parametrize(
    ("top", "source", "files", "documents", "packed", "unit_bytes", "part_bytes"),
    [
        ("", 'id_field = "url"', 3, 900, False, 60_000, 2**24),
        ("validation = 0.1", "", 12, 150, True, 60_000, 2**24),
        ("", "", 9, 250, True, 30_000, 15_000),
        (
            "duplicates = {exact = true, near = false}",
            'language = "other"\nfilters = {size = {min = 40}, terminal_punctuation = false}',
            2,
            1500,
            False,
            30_000,
            2**24,
        ),
    ],
    ids=["ranges", "packed", "packed, in parts", "small units"],
)
def test_disk_opens_and_time_are_what_a_preparation_takes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opens: Callable[[Path | None], int],
    top: str,
    source: str,
    files: int,
    documents: int,
    packed: bool,
    unit_bytes: int,
    part_bytes: int,
) -> None:
    monkeypatch.setattr(unit_parts, "PART_BYTES", part_bytes)
    monkeypatch.setattr(streams, "_COMPRESSED_READ_BYTES", min(2**16, part_bytes // 32))
    write_files(tmp_path / "src", files, documents, packed=packed)
    (tmp_path / "corpus.toml").write_text(TOML.format(top=top, source=source))
    corpus = load_corpus(tmp_path / "corpus.toml")
    taken: dict[str, int] = {}
    remove = WorkDirectory.remove

    def look(work: WorkDirectory) -> None:
        if (work.path / "units").exists():
            taken.update(
                units=len(read_plan(work.plan).units),
                work_bytes=num_bytes(work.path),
                key_bytes=num_bytes(work.path, "units/*/exact-*") + num_bytes(work.path, "units/*/near-*"),
            )
        remove(work)

    monkeypatch.setattr(WorkDirectory, "remove", look)
    # Some dozens of ranges of keys, several in a task, as a large corpus has.
    monkeypatch.setattr(deduplication, "_RANGE_BYTES", 2**14)
    monkeypatch.setattr(deduplication, "_RANGE_TASKS", 4)
    planned = forecast(corpus, estimate(corpus, sample=150), unit_bytes=unit_bytes)
    opens(tmp_path)
    begun_s = time.process_time()
    prepare(corpus, tmp_path / "store", PrepareOptions(unit_bytes=unit_bytes))
    seconds, opened = time.process_time() - begun_s, opens(None)
    assert taken["units"] > 8
    assert planned.units == pytest.approx(taken["units"], abs=1, rel=0.05)
    assert planned.key_bytes == pytest.approx(taken["key_bytes"], rel=0.1)
    assert planned.work_bytes == pytest.approx(taken["work_bytes"], rel=0.1)
    assert planned.store_bytes == pytest.approx(num_bytes(tmp_path / "store"), rel=0.1)
    assert planned.opens == pytest.approx(opened, rel=0.08)
    # Processor time, which a busy machine stretches too, more or less of it from one minute to the next.
    expected_s = sum(step.seconds for step in planned.steps) + planned.alone_seconds
    assert expected_s / 5 < seconds < expected_s * 5


def test_which_formats_are_divided_is_said_as_it_is() -> None:
    file = SourceFile(path=Path("some"), id="some", size_bytes=1, mtime_ns=0)
    for name, entry in FORMATS.items():
        if name != "warc":  # needs a package
            assert entry.divides == (type(entry.load(file)).ranges is not InputFormat.ranges), name


def test_hosts_divide_what_can_be_divided_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is measured anew for each forecast differs from one to the next on a busy machine.
    record_s, token_byte_s = forecasts._record_seconds(), forecasts._token_byte_seconds()
    monkeypatch.setattr(forecasts, "_record_seconds", lambda: record_s)
    monkeypatch.setattr(forecasts, "_token_byte_seconds", lambda: token_byte_s)
    write_files(tmp_path / "src", 1, 400, packed=False)
    (tmp_path / "corpus.toml").write_text(TOML.format(top="", source=""))
    corpus = load_corpus(tmp_path / "corpus.toml")
    found = estimate(corpus, sample=50)
    # As if there were 20,000 files of 50 MB; then ten times as many; then with one beside them that cannot be divided.
    size, number = 50 * 10**6, 20_000
    (own,) = found.sources.values()
    own.files, own.file_bytes = number, size * number
    own.divided_sizes *= 0
    own.divided_sizes.extend([size] * number)
    few, many = (forecast(corpus, found, hosts=hosts, workers=8) for hosts in (1, 16))
    assert few.units == pytest.approx(size * number / 2**26, rel=0.35)
    assert few.opens == many.opens
    assert few.hours / many.hours == pytest.approx(16, rel=0.1)
    assert many.alone_seconds < 0.1 * 3600 * many.hours
    # Linear: ten times the files, ten times all of it.
    own.files, own.file_bytes = 10 * number, 10 * size * number
    own.divided_sizes.extend([size] * 9 * number)
    ten = forecast(corpus, found, hosts=16, workers=8)
    assert ten.opens / many.opens == pytest.approx(10, rel=0.15)
    assert ten.hours / many.hours == pytest.approx(10, rel=0.15)
    own.whole_sizes.append(own.file_bytes // 5)
    alone = forecast(corpus, found, hosts=16, workers=8)
    assert alone.steps[0].wall_seconds(128) == pytest.approx(own.total_seconds / 5, rel=0.1)
    assert StepForecast(name="", tasks=2, seconds=10, longest_seconds=5).wall_seconds(100) == 5


def test_the_command_says_it_for_people_and_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path / "src", 1, 60, packed=False)
    (tmp_path / "corpus.toml").write_text(TOML.format(top="", source=""))
    path = str(tmp_path / "corpus.toml")
    assert cli.main(["data", "plan", path, "--hosts", "16", "--workers", "4", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["preparation"]
    assert (planned["hosts"], planned["workers"]) == (16, 4)
    assert planned["disk"]["key_bytes"] == 60 * (24 + 224)
    assert planned["hours"] * 3600 == pytest.approx(
        planned["alone_seconds"] + sum(step["wall_seconds"] for step in planned["steps"])
    )
    assert cli.main(["data", "plan", path, "--hosts", "16"]) == 0
    shown = capsys.readouterr().out
    assert "read, filter, tokenize" in shown
    assert " seconds on 16 × " in shown
    assert cli.main(["data", "plan", path, "--hosts", "0"]) == 78
    assert "--hosts 0: must be at least 1" in capsys.readouterr().err
    assert cli.main(["data", "plan", path, "--workers", "-1"]) == 78
    assert "--workers -1: must be at least 1" in capsys.readouterr().err


def test_units_are_those_of_the_plan_whatever_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "MAX_RANGES", 3)
    source = SourceEstimate()
    source.whole_sizes.extend([10, 10, 10, 10, 500, 10])
    assert forecasts._units(source, 100) == (4, 6)  # three tiny ones; one; the large one; one
    source.divided_sizes.extend([250])
    assert forecasts._units(source, 100) == (7, 9)
