"""The published ranks of cl100k_base, fetched by the name of a package that carries them."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightscale.data_pipeline.tokenizers import (
    TiktokenTokenizer,
    Tokenizer,
    fast_path_notes,
    load_tiktoken,
    load_tokenizer,
    with_fast_path,
)
from lightscale.errors import UserError

PACKAGE = "llama-index-core==0.14.25"  # MIT; carries tiktoken's cache
CACHE_NAME = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"  # the one that tiktoken checks
SPECIAL = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|endofprompt|>")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=0", "--timeout=15"]
    try:
        subprocess.run([*pip, "--dest", directory, PACKAGE], check=True, capture_output=True, timeout=60)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"the package index has no {PACKAGE}, which carries the ranks of cl100k_base")
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def cl100k(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> TiktokenTokenizer:
    """As somebody has it who puts the file into tiktoken's cache."""
    directory = tmp_path_factory.mktemp("cl100k")
    # Copied out: tiktoken deletes what it does not like in its cache.
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(CACHE_NAME)]
        (directory / CACHE_NAME).write_bytes(archive.read(member))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIKTOKEN_CACHE_DIR", str(directory))
        return load_tiktoken("cl100k_base")


def test_the_installed_package_is_enough(
    wheel: Path, cl100k: TiktokenTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed without what it depends on, so that it cannot be imported; the cache stays empty."""
    site, cache = tmp_path / "site", tmp_path / "cache"
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.endswith(("dist-info/METADATA", CACHE_NAME))]
        archive.extractall(site, wanted)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    monkeypatch.syspath_prepend(site)
    assert load_tiktoken("cl100k_base").sha256 == cl100k.sha256
    assert not cache.exists()
    # Not the file that tiktoken knows by its hash.
    (site / next(name for name in wanted if name.endswith(CACHE_NAME))).write_bytes(b"AA== 0\n")
    with pytest.raises(UserError, match="pip install --no-deps llama-index-core"):
        load_tiktoken("cl100k_base")


def test_cl100k_base_is_the_published_one(cl100k: TiktokenTokenizer, tmp_path: Path) -> None:
    assert (cl100k.vocab_size, cl100k.eot_id) == (100_277, 100_257)
    assert cl100k.encode("Hello, world") == [9906, 11, 1917]
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    cl100k.save(directory)
    assert hashlib.sha256((directory / "ranks.tiktoken").read_bytes()).hexdigest() == SHA256
    assert load_tokenizer(tmp_path).sha256 == cl100k.sha256


@pytest.fixture(scope="module")
def fast(cl100k: TiktokenTokenizer) -> Tokenizer:
    pytest.importorskip("gigatoken", reason="gigatoken, the optional fast path, is not installed")
    return with_fast_path(cl100k)


FORGERIES = [text for spelling in SPECIAL for text in (spelling, f"a {spelling}{spelling}\n{spelling[:-1]}")]


def test_no_text_becomes_a_special_token(cl100k: TiktokenTokenizer) -> None:
    for text, ids in zip(FORGERIES, cl100k.encode_batch(FORGERIES), strict=True):
        assert ids.max() < 100_256
        assert cl100k.decode(ids) == text
        assert cl100k.encode(text) == ids.tolist()


def test_gigatoken_gives_the_same_ids(cl100k: TiktokenTokenizer, fast: Tokenizer) -> None:
    @settings(max_examples=60)
    @given(st.lists(st.text() | st.text(alphabet=" \n\t\r'sSſ1２字éİ<|>\u0300😀", max_size=60), max_size=30))
    def same(texts: list[str]) -> None:
        for ids, text in zip(fast.encode_batch(texts), texts, strict=True):
            assert ids.tolist() == cl100k.encode(text)

    same()
    # Letters to who knows Unicode 17, and to nobody else; in a document that no sample would compare.
    newer = ["a"] * 200
    newer[1] = "§2\U0008f66b\U000331b1>Sª\U000e531a4"
    for ids, text in zip(fast.encode_batch(newer), newer, strict=True):
        assert ids.tolist() == cl100k.encode(text)
    for ids, text in zip(fast.encode_batch(FORGERIES), FORGERIES, strict=True):
        assert ids.tolist() == cl100k.encode(text)
    assert "gigatoken" in fast_path_notes(fast)[0]
    assert " is disabled" not in fast_path_notes(fast)[0]
    assert fast.sha256 == cl100k.sha256


def test_runs_without_end_do_not_stop_it(cl100k: TiktokenTokenizer) -> None:
    for text in ("a" * 300_000, " " * 300_000, "\n" * 300_000, "^" * 300_000, "字" * 100_000):
        assert cl100k.decode(cl100k.encode(text)) == text
