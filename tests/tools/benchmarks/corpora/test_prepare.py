"""The benchmark of the preparation: its tokenizer file, its ratio, its memory at small sizes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightscale.data_pipeline.tokenizers import load_tiktoken
from lightscale.errors import UserError


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).resolve().parents[4] / "tools" / "benchmarks" / "corpora" / "prepare.py"
    spec = importlib.util.spec_from_file_location("bench_prepare", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_prepare"] = module
    spec.loader.exec_module(module)
    return module


def test_made_up_corpora_are_the_same_for_the_same_size_and_have_copies(tool: ModuleType, tmp_path: Path) -> None:
    for name in ("a", "b"):
        tool.write_words(tmp_path / name, 300_000)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    lines = (tmp_path / "a").read_bytes().splitlines()
    assert 300_000 <= (tmp_path / "a").stat().st_size < 320_000
    assert 0.03 < 1 - len(set(lines)) / len(lines) < 0.2
    assert all(len(json.loads(line)["text"]) > 100 for line in lines)


def test_memory_is_that_of_one_process_with_all_the_work(tool: ModuleType, tmp_path: Path) -> None:
    found = tool.measure_memory(400_000, tmp_path)
    assert found["corpus_bytes"] == 400_000
    assert found["tokens"] > 300_000  # a token a byte
    assert 50e6 < found["peak_bytes"] < 2e9
    assert [path.suffix for path in tmp_path.iterdir()] == [".bytes"]


@pytest.fixture
def ranks() -> None:
    try:
        load_tiktoken("cl100k_base")
    except UserError as error:
        pytest.skip(f"no cached ranks: {error}")


@pytest.mark.long
@pytest.mark.usefixtures("ranks")
def test_the_hugging_face_form_gives_the_same_ids(tool: ModuleType, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="datatrove's tokenizer")
    tool.write_huggingface(tmp_path / "tokenizer.json")
    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tiktoken("cl100k_base")
    sources = sorted(Path(__file__).resolve().parents[4].glob("lightscale/**/*.py"))
    texts = ["世界，你好！ 12345 it's\r\n\t\u3000é", *(path.read_text() for path in sources[:30])]
    for text in texts:
        assert theirs.encode(text).ids == ours.encode(text)


@pytest.mark.long
@pytest.mark.parametrize(("flags", "encodes"), [([], False), (["--gigatoken"], True)])
def test_tiktoken_encodes_unless_gigatoken_is_asked_for(
    tool: ModuleType, tmp_path: Path, flags: list[str], encodes: bool
) -> None:
    pytest.importorskip("gigatoken", reason="the faster encoder")
    script = Path(tool.__file__ or "").with_name("prepare_lightscale.py")
    # As a worker does: the script's own name is another there.
    program = f"import runpy; runpy.run_path({str(script)!r}, run_name='__mp_main__'); import gigatoken"
    command = [sys.executable, "-c", program, str(tmp_path), "2", "parts", *flags]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode == 0) == encodes
    assert encodes or "gigatoken" in finished.stderr.splitlines()[-1]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ranks")
def test_the_whole_pipeline_is_faster_than_datatrove(tool: ModuleType, tmp_path: Path) -> None:
    tool.write_words(tmp_path / "made.jsonl", 2_000_000)
    result = tool.run(tmp_path / "made.jsonl", repeats=1, memory=False)
    assert result["ways"]["lightscale"]["kept_documents"] > 100
    if "lightscale_gigatoken" in result["ways"]:
        for count in ("kept_documents", "tokens"):
            assert result["ways"]["lightscale_gigatoken"][count] == result["ways"]["lightscale"][count]
    if isinstance(result.get("datatrove"), str):
        pytest.skip(result["datatrove"])
    print(json.dumps(result))
    ours, theirs = result["ways"]["lightscale"], result["ways"]["datatrove"]
    assert result["ratio"] == pytest.approx(theirs["median_s"] / ours["median_s"])
    assert result["ratio"] > 1


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_memory_hardly_grows_with_the_corpus(tool: ModuleType, tmp_path: Path) -> None:
    """By less than what is read more; `tools/bench.py data` measures it at 100 MB and 1 GB, which takes long."""
    small, large = (tool.measure_memory(size, tmp_path)["peak_bytes"] for size in (20_000_000, 80_000_000))
    print(f"peak memory: {small / 1e6:.0f} MB for 20 MB, {large / 1e6:.0f} MB for 80 MB")
    assert large < small + 40e6
    assert large < 400e6
