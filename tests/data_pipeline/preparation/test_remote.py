"""Files of servers: s3 on moto's server, http on Python's, both real ones on this machine, also when they fail."""

import functools
import gzip
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightscale import cli
from lightscale.data_pipeline.preparation.corpus import load_corpus
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.preparation.readers import cut_into_ranges, read, remote
from lightscale.data_pipeline.preparation.readers.inputs import CHANGED, OTHER_KIND, UNREADABLE, Problems, ReadOptions
from lightscale.data_pipeline.preparation.sources import FileLister
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("aiohttp", reason="http is read by aiohttp")

RECORDS = [{"text": f"{number}: " + "word 字\n" * (number % 40)} for number in range(300)]
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_WAITS_S", (0.01,) * 4)


class Failing(http.server.SimpleHTTPRequestHandler):
    """Serves a directory; answers the next ``failures`` requests with 503, and counts all."""

    failures = 0
    requests = 0

    def send_head(self) -> Any:
        type(self).requests += 1
        if type(self).failures:
            type(self).failures -= 1
            self.send_error(503)
            return None
        return super().send_head()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The URL of a server of ``tmp_path``."""
    Failing.failures = Failing.requests = 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Failing, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """(client, name) of an empty bucket."""
    pytest.importorskip("s3fs", reason="s3 is read by s3fs: pip install s3fs 'moto[s3]' flask flask-cors")
    boto3, moto_server = (pytest.importorskip(name, reason="moto serves s3") for name in ("boto3", "moto.server"))
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = boto3.client("s3")
        client.create_bucket(Bucket="texts")
        yield client
    server.stop()


def read_all(*entries: str, range_bytes: int = 10**9) -> tuple[list[tuple[str, Any]], Problems]:
    problems, options = Problems(), ReadOptions()
    found: list[tuple[str, Any]] = []
    for file in FileLister(problems).files(entries):
        for one in cut_into_ranges(file, range_bytes, problems, options=options):
            documents = read(one, problems, options=options, advance=lambda _: None)
            found += [(item.id, item.data if isinstance(item.data, str) else item.data.decode()) for item in documents]
    return found, problems


def test_s3_gives_what_the_same_files_give_here(bucket: Any, tmp_path: Path) -> None:
    here = tmp_path / "corpus"
    (here / "more").mkdir(parents=True)
    (here / "a.jsonl").write_bytes(LINES)
    (here / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    parquet.write_table(
        pyarrow.table({"text": [record["text"] for record in RECORDS]}), here / "more/c.parquet", row_group_size=50
    )
    (here / "more/notes.txt").write_text("a text")
    (here / "more/other.xyz").write_text("not read")
    for path in here.rglob("*.*"):
        bucket.upload_file(str(path), "texts", f"corpus/{path.relative_to(here)}")
    expected, problems = read_all(str(here), range_bytes=3000)
    assert len(expected) == 3 * 300 + 1
    found, same = read_all("s3://texts/corpus", range_bytes=20_000)
    assert found == expected
    assert same.counts == problems.counts == {OTHER_KIND: 1}
    assert [name for name, _ in read_all("s3://texts/corpus/*.jsonl")[0]][:1] == ["a.jsonl@0"]
    assert len(read_all("s3://texts/corpus/*.jsonl*")[0]) == 600
    with pytest.raises(UserError, match=r"s3://texts/none: it does not exist"):
        read_all("s3://texts/none")
    with pytest.raises(UserError, match=r"s3://nobucket/x: "):
        read_all("s3://nobucket/x")


def test_an_object_that_changes_after_listing_is_counted(bucket: Any) -> None:
    bucket.put_object(Bucket="texts", Key="changing.jsonl", Body=LINES)
    problems, options = Problems(), ReadOptions()
    (file,) = FileLister(problems).files(["s3://texts/changing.jsonl"])
    (one,) = cut_into_ranges(file, 10**9, problems, options=options)
    bucket.put_object(Bucket="texts", Key="changing.jsonl", Body=LINES.replace(b"word", b"ward"))
    assert not list(read(one, problems, options=options, advance=lambda _: None))
    assert problems.counts == {CHANGED: 1}


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.txt", "d.parquet"])
def test_a_server_without_parts_that_fails_twice_is_survived(web: str, tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        parquet.write_table(pyarrow.table({"text": [record["text"] for record in RECORDS]}), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(gzip.compress(LINES) if name.endswith("gz") else LINES)
    expected, _ = read_all(str(tmp_path / name))
    Failing.failures = 2
    found, problems = read_all(f"{web}/{name}?token=x", range_bytes=3000)
    assert found == expected
    assert not problems.counts
    # Listing asks for it, reading asks again and fetches it once: not once for each range.
    assert Failing.requests <= 14


def test_what_fails_for_good_is_refused_when_listed_and_counted_when_read(web: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINES)
    with pytest.raises(UserError, match=r"none\.jsonl: the server has no such file$"):
        read_all(f"{web}/none.jsonl")
    assert Failing.requests <= 3  # not asked for again
    with pytest.raises(UserError, match=r"/: directories of a server cannot be listed; list its files"):
        read_all(f"{web}/")
    problems, options = Problems(), ReadOptions()
    (file,) = FileLister(problems).files([f"{web}/d.jsonl"])
    (one,) = cut_into_ranges(file, 10**9, problems, options=options)
    Failing.failures = 10**6
    assert not list(read(one, problems, options=options, advance=lambda _: None))
    assert problems.counts == {UNREADABLE: 1}
    assert "5 requests failed" in problems.examples[UNREADABLE][0]
    with pytest.raises(UserError, match=r"d\.jsonl: 5 requests failed"):
        read_all(f"{web}/d.jsonl")


def test_a_server_that_does_not_answer_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINES)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = taken.getsockname()
    url = f"http://127.0.0.1:{address[1]}/d.jsonl"
    with pytest.raises(UserError, match=r"d\.jsonl: 5 requests failed, the last with: Cannot connect"):
        read_all(url)
    Failing.failures = 0
    servers = []

    def start(wait_s: float) -> None:
        if not servers:
            servers.append(
                http.server.ThreadingHTTPServer(address, functools.partial(Failing, directory=str(tmp_path)))
            )
            threading.Thread(target=servers[0].serve_forever, daemon=True).start()

    monkeypatch.setattr(remote.time, "sleep", start)
    assert len(read_all(url)[0]) == len(RECORDS)
    servers[0].shutdown()
    servers[0].server_close()


def check_store(tmp_path: Path, url: str) -> None:
    """A store of the file at ``url`` is that of ``d.jsonl`` here."""
    stores = []
    for name, path in (("here", "d.jsonl"), ("there", url)):
        toml = f'vocab_size = 400\n[duplicates]\nnear = false\n[sources.a]\npaths = ["{path}"]\n'
        (tmp_path / f"{name}.toml").write_text(toml)
        prepare(load_corpus(tmp_path / f"{name}.toml"), tmp_path / name, PrepareOptions(unit_bytes=32_768))
        stores.append(TokenStore(tmp_path / name).sources["a"])
    assert stores[0].content_hash == stores[1].content_hash
    assert stores[0].origin(5) == stores[1].origin(5)


def test_a_store_of_http_is_that_of_the_files(web: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINES)
    check_store(tmp_path, f"{web}/d.jsonl".replace("http", "Http", 1))


def test_a_url_on_the_command_line_is_one(web: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINES)
    url = f"{web}/d.jsonl?token=x".replace("http", "HTTP", 1)  # a scheme may be in capitals
    command = ["data", "prepare", url, "--tokenizer", "ascii", "--out", str(tmp_path / "store")]
    assert cli.main(command) == 0
    assert TokenStore(tmp_path / "store").source("d").num_documents > 200


def test_a_store_of_s3_is_that_of_the_files(bucket: Any, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINES)
    bucket.put_object(Bucket="texts", Key="d.jsonl", Body=LINES)
    check_store(tmp_path, "S3://texts/d.jsonl")
