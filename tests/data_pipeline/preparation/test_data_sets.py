"""Data sets of Hugging Face: what ``save_to_disk`` writes, a ``DatasetDict`` of splits, the hub's parquet.

Where ``datasets`` is installed it writes them here; it is no dependency, because it brings twenty others. Without it
they are written by pyarrow in the same form: these tests passed both ways with datasets 5.2.0.
"""

import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from lightscale.data_pipeline.preparation import sources
from lightscale.data_pipeline.preparation.readers import RawDocument, cut_into_ranges, read
from lightscale.data_pipeline.preparation.readers.inputs import Problems, ReadOptions
from lightscale.data_pipeline.preparation.readers.remote import RemotePath, RemoteStatus
from lightscale.data_pipeline.preparation.sources import FileLister
from lightscale.errors import UserError

pyarrow = pytest.importorskip("pyarrow", reason="data sets are read by pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = {
    "text": [f"document {number}, 第{number}篇" for number in range(5)],
    "meta": [{"url": f"http://x/{number}"} for number in range(5)],
}
Save = Callable[[Path, dict[str, list[Any]]], None]


def save_as_documented(folder: Path, rows: dict[str, list[Any]]) -> None:
    """Streams of Arrow's format in two files, their names in state.json, the types of columns in dataset_info.json."""
    folder.mkdir(parents=True)
    info = {"features": {"text": {"dtype": "string", "_type": "Value"}}}
    table = pyarrow.table(rows).replace_schema_metadata({"huggingface": json.dumps({"info": info})})
    files = []
    for number, (begin, end) in enumerate(((0, 3), (3, None))):
        files.append(f"data-{number:05}-of-00002.arrow")
        with pyarrow.ipc.new_stream(folder / files[-1], table.schema) as out:
            out.write_table(table[begin:end])
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "description": "", **info}))
    state = {"_data_files": [{"filename": name} for name in files], "_fingerprint": "154ab7e9eadc854e", "_split": None}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    # What datasets keeps of filter() and map() beside a data set that is open.
    with pyarrow.ipc.new_stream(folder / "cache-b9212cde623ac51d.arrow", table.schema) as out:
        out.write_table(table.slice(0, 2))


def save_by_datasets(folder: Path, rows: dict[str, list[Any]]) -> None:
    datasets = importlib.import_module("datasets")
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder), num_shards=2)
    datasets.load_from_disk(str(folder)).map(lambda row: {"text": f"{row['text']} again"})
    assert list(folder.glob("cache-*.arrow"))


@pytest.fixture(params=[save_as_documented, save_by_datasets])
def save(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    if request.param is save_by_datasets:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
        pytest.importorskip("datasets", reason="datasets is not installed")
    chosen: Save = request.param
    return chosen


def documents_of(path: Path | str) -> list[RawDocument]:
    problems, options = Problems(strict=True), ReadOptions(id_field="meta.url")
    return [
        document
        for file in FileLister(problems).files([str(path)])
        for part in cut_into_ranges(file, 100, problems, options=options)
        for document in read(part, problems, options=options, advance=lambda _: None)
    ]


def texts(documents: list[RawDocument]) -> list[str]:
    return [item.data.decode() if isinstance(item.data, bytes) else item.data for item in documents]


def test_a_saved_data_set_gives_its_rows_in_their_order(save: Save, tmp_path: Path) -> None:
    save(tmp_path / "set", ROWS)
    documents = documents_of(tmp_path / "set")
    assert texts(documents) == ROWS["text"]
    assert [document.own_id for document in documents] == [meta["url"] for meta in ROWS["meta"]]
    assert [document.id for document in documents] == [
        *(f"set/data-00000-of-00002.arrow@{row}" for row in range(3)),
        *(f"set/data-00001-of-00002.arrow@{row}" for row in range(2)),
    ]
    (tmp_path / "set" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow is missing; state\.json lists it"):
        documents_of(tmp_path / "set")


def test_of_a_dictionary_of_splits_one_is_named(save: Save, tmp_path: Path) -> None:
    for split, begin in (("test", 3), ("train", 0)):
        save(tmp_path / "set" / split, {name: column[begin:] for name, column in ROWS.items()})
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"set: a data set with the splits test, train; .* like .*set/train$"):
        documents_of(tmp_path / "set")
    assert texts(documents_of(tmp_path / "set" / "train")) == ROWS["text"]


@pytest.mark.parametrize(
    ("train", "test", "example"),
    [
        ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "data/train*"),  # push_to_hub
        ("default/train/0000.parquet", "default/test/0000.parquet", "default/train"),  # what the hub has converted
        ("data/train/a.parquet", "data/test/a.parquet", "data/train"),
        ("train.parquet", "dev.parquet", "train*"),
        ("training.parquet", "evaluation.parquet", "training*"),
        ("val.parquet", "valid-1.parquet", "val[!a-z]*"),
        ("train-00000-of-00001.parquet", "validation.parquet", "train*"),
        ("en/c4-train.00000-of-00002.parquet", "en/c4-validation.00000-of-00001.parquet", "en/c4-train*"),
    ],
)
def test_splits_on_the_hub_are_not_mixed(tmp_path: Path, train: str, test: str, example: str) -> None:
    """Files in ``snapshots`` are links to blobs without suffixes."""
    for number, name in enumerate((train, test)):
        parquet.write_table(pyarrow.table(ROWS), tmp_path / f"blob{number}")
        (tmp_path / "snapshots" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "snapshots" / name).symlink_to(tmp_path / f"blob{number}")
    with pytest.raises(
        UserError, match=(r"a data set with the splits \w+, \w+; .* use the path of one split")
    ) as refused:
        documents_of(tmp_path / "snapshots")
    suggested = str(refused.value).rpartition(" like ")[2]
    assert suggested == str(tmp_path / "snapshots" / example)
    documents = documents_of(suggested)
    assert texts(documents) == ROWS["text"]
    assert Path(train).name in documents[0].id
    (tmp_path / "snapshots" / test).unlink()
    assert texts(documents_of(tmp_path / "snapshots")) == ROWS["text"]


@pytest.mark.parametrize(
    ("names", "example"),
    [
        (("set/train-00000-of-00001.parquet", "set/test-00000-of-00001.parquet"), "train*"),
        (("set/default/train/0.parquet", "set/default/test/0.parquet"), "default/train"),
        (("set/dataset_dict.json", "set/a/state.json", "set/b/state.json"), "a"),
        (("set/c4-train.00000-of-00001.jsonl.gz", "set/c4-validation.00000-of-00001.jsonl.gz"), "c4-train*"),
    ],
)
def test_splits_below_a_prefix_of_s3_are_not_mixed(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], example: str
) -> None:
    def found(entry: str, chosen: Iterable[str]) -> None:
        listed = [(name, RemotePath(f"s3://bucket/{name}")) for name in chosen]
        monkeypatch.setattr(sources, "list_files", lambda entry: iter(listed))
        list(FileLister(Problems()).files([entry]))

    monkeypatch.setattr(RemotePath, "stat", lambda path: RemoteStatus(st_size=1, st_mtime_ns=0, gives_parts=True))
    with pytest.raises(UserError, match=r"s3://bucket/set.*: a data set with the splits \w+, \w+; ") as refused:
        found("s3://bucket/set/", names)
    assert str(refused.value).endswith(f" like s3://bucket/set/{example}")
    # One of them, and what a pattern has chosen.
    found("s3://bucket/set", names[:1])
    found("s3://bucket/set/*", [name.rpartition("/")[2] for name in names])


def test_files_that_only_sound_like_splits_are_read(tmp_path: Path) -> None:
    for name in ("web-dev.parquet", "ml-train.parquet", "test-pilots.parquet", "train-1.parquet", "Train-2.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table(ROWS), tmp_path / name)
    for name in ("train.py", "test.py", "train/a.py", "test/a.py", ".test.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert len(documents_of(tmp_path)) == 5 * 5 + 4
