import os
from pathlib import Path

import pytest

from lightscale.data_pipeline.preparation.readers.inputs import (
    DIRECTORY_LOOP,
    NOT_JSON,
    OTHER_KIND,
    READ_TWICE,
    UNREADABLE,
    Problems,
)
from lightscale.data_pipeline.preparation.sources import STDLIB_PATH, FileLister
from lightscale.data_pipeline.preparation.work_directory import WorkDirectory
from lightscale.errors import UserError


def listed(*entries: Path | str, suffixes: list[str] | None = None) -> tuple[list[str], Problems]:
    problems = Problems()
    options = {} if suffixes is None else {"suffixes": suffixes}
    files = FileLister(problems).files([str(entry) for entry in entries], **options)
    return [file.id for file in files], problems


def touch(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")


def test_a_directory_is_listed_by_name_and_suffix(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    names = ("b.txt", "a/z.md", "a/b.py", "c.rst", "d.jsonl.zst", "image.png", ".git/config.txt", "__pycache__/x.py")
    touch(corpus, *names)
    ids, problems = listed(corpus)
    assert ids == [f"corpus/{name}" for name in ("a/b.py", "a/z.md", "b.txt", "c.rst", "d.jsonl.zst")]
    assert problems.as_json() == {OTHER_KIND: {"count": 1, "examples": ["corpus/image.png"]}}
    assert listed(corpus, suffixes=[".png"])[0] == ["corpus/image.png"]


def test_a_given_file_is_listed_whatever_its_suffix_with_size_and_time(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"12345")
    (file,) = FileLister(Problems()).files([str(tmp_path / "notes")])
    assert (file.id, file.size_bytes, file.mtime_ns) == ("notes", 5, (tmp_path / "notes").stat().st_mtime_ns)


def test_a_pattern_is_listed_by_name(tmp_path: Path) -> None:
    touch(tmp_path, "b.jsonl", "a.jsonl", "a.txt", "deep/er/c.jsonl", "[x].txt")
    assert listed(tmp_path / "*.jsonl")[0] == ["a.jsonl", "b.jsonl"]
    assert listed(tmp_path / "**" / "*.jsonl")[0] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert listed(tmp_path / "de*")[0] == ["deep/er/c.jsonl"]
    assert listed(tmp_path / "[x].txt")[0] == ["[x].txt"]  # what is there is no pattern
    with pytest.raises(UserError, match=r"none\*\.jsonl: no file matches this pattern"):
        listed(tmp_path / "none*.jsonl")


def test_files_of_an_earlier_lister_are_not_listed_again(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt", "b.txt")
    first, problems = FileLister(Problems()), Problems()
    assert len(list(first.files([str(tmp_path / "a.txt")]))) == 1
    assert [file.id for file in FileLister(problems, after=first).files([str(tmp_path)])] == [f"{tmp_path.name}/b.txt"]
    assert problems.counts == {READ_TWICE: 1}


def test_what_cannot_be_read_is_counted_by_name_and_the_rest_goes_on(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    touch(corpus, "good.txt", "sub/good.txt")
    (corpus / "dangling.txt").symlink_to("nowhere")
    (corpus / "itself.txt").symlink_to("itself.txt")
    (corpus / "sub" / "up").symlink_to(corpus, target_is_directory=True)
    (corpus / "directory.txt").mkdir()
    os.mkfifo(corpus / "pipe.txt")  # opening it would wait for a writer
    ids, problems = listed(corpus)
    assert ids == ["corpus/good.txt", "corpus/sub/good.txt"]
    assert problems.counts == {UNREADABLE: 3, DIRECTORY_LOOP: 1}
    assert [place.split(":")[0] for place in problems.examples[UNREADABLE]] == [
        "corpus/dangling.txt",
        "corpus/itself.txt",
        "corpus/pipe.txt",
    ]
    assert problems.examples[DIRECTORY_LOOP][0].startswith("corpus/sub/up:")


def test_strict_stops_at_an_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"unreadable file: .*/gone\.txt: No such file or directory"):
        list(FileLister(Problems(strict=True)).files([str(tmp_path)]))


def test_a_root_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: No such file or directory"):
        listed(tmp_path / "nowhere")


def test_a_file_under_two_roots_is_listed_once(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt")
    (tmp_path / "link.txt").symlink_to("a.txt")
    ids, problems = listed(tmp_path, tmp_path / "a.txt")
    assert ids == [f"{tmp_path.name}/a.txt"]
    assert problems.counts == {READ_TWICE: 2}


def test_a_name_that_is_not_utf8_gives_a_printable_id(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("a")
    assert listed(tmp_path)[0] == [f"{tmp_path.name}/caf\\xe9.txt"]


def test_only_the_first_places_of_a_problem_are_kept_also_when_merged() -> None:
    problems, few, merged = Problems(), Problems(), Problems()
    places = [f"line {number}" for number in range(25)]
    for place in places:
        problems.add(NOT_JSON, place)
    assert problems.as_json() == {NOT_JSON: {"count": 25, "examples": places[:20]}}
    for place in places[:3]:
        few.add(NOT_JSON, place)
    for part in (few, problems, few):
        merged.merge(part.as_part())
    assert merged.as_json() == {NOT_JSON: {"count": 31, "examples": [*places[:3], *places[:17]]}}


def test_what_is_wrong_with_a_whole_file_counts_once_over_its_ranges(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    first, second = FileLister(Problems()).files([str(tmp_path)])
    for cuts in ([], [1], [2], [3], [1, 2, 3, 4]):
        merged, part = Problems(), Problems()
        for number, file in enumerate([first, first, first, second, second]):
            if number in cuts:
                merged.merge(part.as_part())
                part = Problems()
            part.add(UNREADABLE, f"{file.id}: gone", file=file)
        merged.merge(part.as_part())
        assert merged.as_json() == {UNREADABLE: {"count": 2, "examples": [f"{first.id}: gone", f"{second.id}: gone"]}}


def test_files_of_other_kinds_in_a_directory_are_counted(tmp_path: Path) -> None:
    for name in ("a.txt", "b.json", "c.jsonl.xz", ".hidden", "README"):
        (tmp_path / name).write_text(name)
    problems = Problems(strict=True)
    assert [file.path.name for file in FileLister(problems).files([str(tmp_path)])] == ["a.txt"]
    places = [f"{tmp_path.name}/{name}" for name in ("README", "b.json", "c.jsonl.xz")]
    assert problems.as_json() == {OTHER_KIND: {"count": 3, "examples": places}}


def test_nothing_of_a_preparation_is_of_its_corpus(tmp_path: Path) -> None:
    with WorkDirectory.beside(tmp_path / "store").locked():
        for name in ("a.txt", "b.work/c.txt", "store.work/plan.jsonl"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("x")
        ids, problems = listed(tmp_path)
    assert ids == [f"{tmp_path.name}/a.txt", f"{tmp_path.name}/b.work/c.txt"]
    assert not problems.counts


def test_the_standard_library_without_its_tests() -> None:
    ids, problems = listed(STDLIB_PATH)
    assert {"abc.py", "asyncio/base_events.py", "json/decoder.py"} <= set(ids)
    assert all(name.endswith(".py") for name in ids)
    assert not [name for name in ids if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/"))]
    assert ids == listed(STDLIB_PATH)[0]
    assert len(set(ids)) == len(ids) > 300
    # Debian's library has a file by two names.
    assert set(problems.counts) <= {READ_TWICE}
