"""The whole preparation of a corpus, timed: ``python tools/benchmarks/corpora/prepare.py [--json]``.

Two questions. How fast is it beside datatrove? And does its memory grow with the corpus?

The ways, which take turns, each as a program of its own whose start counts, with two processes each:

- ``lightscale``: tiktoken encodes;
- ``lightscale_gigatoken``: the same with the faster encoder of the same ids that lightscale uses where it is installed
  (pip install 'lightscale[corpus]'); the ratio is not of this one;
- ``datatrove``: its readers, its versions of the same filters (Gopher, FineWeb), near-duplicates by MinHash (14 bands
  of 8 over 5-grams, which it takes of words, not of tokens), Hugging Face tokenizers with cl100k_base. It is optional
  (pip install datatrove spacy nltk tokenizers); without it only lightscale is timed.

They get the same documents, real ones: LibreOffice's help and the documentation of the Linux kernel, 35 MB. Of the
help alone, 5 MB, lightscale's time would be mostly that of starting up. They do not keep the same documents, because
the details of the rules differ; lightscale keeps more.
"""

import argparse
import importlib.util
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tiktoken

from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import prepare
from lightscale.data_pipeline.tokenizers import load_tiktoken
from lightscale.errors import UserError
from lightscale.training.health.memory import peak_memory_bytes

ENCODING = "cl100k_base"
WORKERS = 2
AIM = 5.0
# Peaks of memory may differ by this factor though the corpus grows tenfold.
FLAT = 1.15
_SMALL_BYTES, _LARGE_BYTES = 100_000_000, 1_000_000_000


def run(
    documents: Path | None = None,
    *,
    repeats: int = 3,
    memory_bytes: tuple[int, int] = (_SMALL_BYTES, _LARGE_BYTES),
    memory: bool = True,
) -> dict[str, Any]:
    """Time both and measure memory.

    ``documents``: jsonl with ``text`` in English; none: pages from two Debian packages. ``memory_bytes``: sizes of the
    two corpora whose peak memory is compared. Raises ``UserError`` where there is no text or no ranks of cl100k_base.
    """
    load_tiktoken(ENCODING)  # says what to put where
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parts = _parts(documents or pages(folder), folder / "parts")
        result: dict[str, Any] = {
            "documents": sum(path.read_bytes().count(b"\n") for path in parts),
            "text_bytes": sum(len(json.loads(line)["text"].encode()) for path in parts for line in path.open()),
            "workers": WORKERS,
        }
        ours = ["prepare_lightscale.py", str(parts[0].parent)]
        ways = {"lightscale": ours}
        if (missing := _missing("gigatoken")) is None:
            ways["lightscale_gigatoken"] = [*ours, "--gigatoken"]
        else:
            result["lightscale_gigatoken"] = missing
        if (missing := _missing("datatrove", "spacy", "nltk", "tokenizers", "xxhash")) is None:
            tokenizer = folder / "tokenizer.json"
            write_huggingface(tokenizer)
            ways["datatrove"] = ["prepare_datatrove.py", str(parts[0].parent), str(tokenizer)]
        else:
            result["datatrove"] = missing
        result["ways"] = _take_turns(ways, folder, repeats, result)
        if "datatrove" in result["ways"]:
            result["ratio"] = result["ways"]["datatrove"]["median_s"] / result["ways"]["lightscale"]["median_s"]
            result["aim"] = AIM
        if memory:
            result["peak_memory"] = [measure_memory(size, folder) for size in memory_bytes]
    return result


def _take_turns(ways: dict[str, list[str]], folder: Path, repeats: int, result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: {"samples_s": []} for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            out = folder / f"out-{name}"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            began = time.perf_counter()
            found[name] |= _run_script(way, out)
            found[name]["samples_s"].append(time.perf_counter() - began)
    for figures in found.values():
        figures["best_s"] = min(figures["samples_s"])
        figures["median_s"] = statistics.median(figures["samples_s"])
        figures["documents_per_s"] = result["documents"] / figures["median_s"]
        figures["megabytes_per_s"] = result["text_bytes"] / figures["median_s"] / 1e6
    return found


def _parts(documents: Path, folder: Path) -> list[Path]:
    """``documents`` as one file for each worker, which is how datatrove shares work."""
    folder.mkdir()
    lines = documents.read_bytes().splitlines(keepends=True)
    parts = []
    for number in range(WORKERS):
        part = folder / f"part-{number}.jsonl"
        part.write_bytes(b"".join(lines[number::WORKERS]))
        parts.append(part)
    return parts


def pages(folder: Path) -> Path:
    """English pages of two Debian packages, in one file."""
    tool = _load(Path(__file__).parents[2] / "texts" / "real_text.py")
    target = folder / "pages.jsonl"
    try:
        target.write_bytes(b"".join(tool.fetch(name, folder).read_bytes() for name in ("en", "kernel")))
    except tool.UnavailableError as error:
        raise UserError(f"no text to measure with ({error}); give a jsonl file") from error
    return target


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_script(way: list[str], out: Path) -> dict[str, Any]:
    """Run the script ``way[0]`` of this folder as a program of its own; what it prints."""
    script, *arguments = way
    command = [sys.executable, str(Path(__file__).with_name(script)), str(out), str(WORKERS), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{script} failed: {finished.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return figures


def _missing(*packages: str) -> str | None:
    name = next((name for name in packages if importlib.util.find_spec(name) is None), None)
    return name and f"not timed: {name} is not installed"


def write_huggingface(path: Path) -> None:
    """cl100k_base as a Hugging Face tokenizer file: the form that datatrove takes. Same ids (see the test)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - optional package

    encoding = tiktoken.get_encoding(ENCODING)
    ranks: dict[bytes, int] = encoding._mergeable_ranks
    letters = _byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    pairs = (_last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    merges = [(spelled[left], spelled[right]) for left, right in pairs]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    # In this engine's language {1,3}+ is not possessive, it repeats.
    pattern = encoding._pat_str.replace("{1,3}+", "{1,3}")
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that byte-pair encoding joins last to make ``token``."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in itertools.pairwise(parts)]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _byte_letters() -> list[str]:
    """The printable letter for every byte in such files (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def measure_memory(num_bytes: int, folder: Path) -> dict[str, int]:
    """Peak resident memory, in bytes, of one process that prepares ``num_bytes`` of made-up jsonl."""
    corpus, out = folder / f"made-{num_bytes}.jsonl", folder / f"made-{num_bytes}.store"
    write_words(corpus, num_bytes)
    command = [sys.executable, str(Path(__file__).resolve()), "--measure-one", str(corpus), "--out", str(out)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    corpus.unlink()
    shutil.rmtree(out)
    return {"corpus_bytes": num_bytes, **json.loads(finished.stdout.splitlines()[-1])}


def write_words(path: Path, num_bytes: int) -> None:
    """Documents of made-up sentences, a tenth of them copies of earlier ones; the same for the same size."""
    import random  # noqa: PLC0415

    generator = random.Random(0)
    words = [
        "the",
        "of",
        "and",
        "to",
        "that",
        *("".join(generator.choices("abcdefghijklmnop", k=7)) for _ in range(20_000)),
    ]
    written, kept = 0, b""
    with path.open("wb") as lines:
        while written < num_bytes:
            if not kept or generator.random() > 0.1:
                sentences = (" ".join(generator.choices(words, k=12)) + "." for _ in range(generator.randint(5, 60)))
                text = "\n".join(f"the of {sentence}" for sentence in sentences)
                kept = json.dumps({"text": text}).encode() + b"\n"
            written += lines.write(kept)


def _measure_one(corpus_file: Path, out: Path) -> None:
    """Prepare with a vocabulary of bytes: what is measured is the pipeline."""
    from lightscale.data_pipeline.tokenizers import TiktokenTokenizer  # noqa: PLC0415

    ranks = {bytes([byte]): byte for byte in range(256)}
    tokenizer = TiktokenTokenizer(
        name="bytes", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )
    directory = out.with_suffix(".bytes") / "tokenizer"
    directory.mkdir(parents=True)
    tokenizer.save(directory)
    sources = {"text": {"paths": [str(corpus_file)], "language": "other"}}
    table = {"tokenizer": str(directory.parent), "sources": sources}
    began = time.perf_counter()
    report = prepare(make_corpus(table, origin="benchmark"), out)
    tokens = report["sources"]["text"]["tokens"]
    print(json.dumps({"peak_bytes": peak_memory_bytes(), "tokens": tokens, "seconds": time.perf_counter() - began}))


def main() -> int:
    """The command line; 1 where the ratio or the memory is not what it should be."""
    parser = argparse.ArgumentParser(description="Time the preparation of a corpus, compared with datatrove.")
    parser.add_argument("--documents", type=Path, help="jsonl with English texts (default: pages of Debian packages)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true", help="skip peak memory")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure-one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_one:
        _measure_one(args.measure_one, args.out)
        return 0
    try:
        result = run(args.documents, repeats=args.repeats, memory=not args.no_memory)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))
    peaks = [figures["peak_bytes"] for figures in result.get("peak_memory", [])]
    return int(result.get("ratio", AIM) < AIM or (len(peaks) == 2 and peaks[1] > FLAT * peaks[0]))


if __name__ == "__main__":
    sys.exit(main())
