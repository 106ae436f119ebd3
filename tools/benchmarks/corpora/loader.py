"""The loader beside the ways that others read tokens, from the page cache; and how long a resume takes.

All ways read the same windows at random places of one token stream, in one run and in turns. What counts is the ratio
of the medians, of processor time. Of the others only the tokens are asked:

- ``loader``: int64 inputs and labels, and where documents begin, as a training step gets them;
- ``loader_positions``: the same and the positions made of it, which on a GPU are made there;
- ``memmap``: the windows copied out of a memory map of the same file (uint32), the least that any loader does;
- ``zarr``: the windows read through zarr-python (uint32);
- ``megatron``: Megatron core's ``IndexedDataset`` (int32 on disk) and the cast to int64 that its GPT dataset makes;
- ``mosaic``: mosaicml-streaming's ``LocalDataset`` over samples that were cut to the window's length beforehand.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray

from lightscale.data_pipeline.loading.loader import LoaderLayout, Packing, TokenLoader
from lightscale.data_pipeline.store.format import SourceCounts, write_root, write_source_attributes
from lightscale.data_pipeline.store.shards import ShardLayout, write_metadata
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer

# What the loader must reach, as shares of the raw copy and multiples of zarr's own reading, by window length.
LEAST_OF_MEMMAP = {8192: 0.2, 131_072: 0.15}
LEAST_OVER_ZARR = {8192: 20.0, 131_072: 2.5}
LEAST_OF_UNCHECKED = {"first": 0.5, "later": 0.9}
AIM_TOKENS_PER_S = 300e6
RESUME_LIMIT_S = 0.05
RESUME_TOKENS = 300_000_000_000

_MICRO_BATCH_TOKENS = 2**16
_SPARSE_SHARD, _SPARSE_CHUNK = 2**32, 2**26

Read = Callable[[int], object]
"""Reads the windows of turn number k."""


def run(
    *,
    lengths: Sequence[int] = (8192, 131_072),
    num_tokens: int = 2**26,
    tokens_per_turn: int = 2**23,
    repeats: int = 5,
    others: bool = True,
) -> dict[str, Any]:
    """Rates, ratios and the time of a resume, as plain values.

    Args:
        lengths: of the windows, in tokens.
        num_tokens: in the store that is written for this; documents of about 350 tokens.
        tokens_per_turn: what every way reads before it is the next one's turn.
        repeats: turns that count, after one that does not.
        others: False leaves Megatron and mosaic out.
    """
    with tempfile.TemporaryDirectory(prefix="lightscale-bench-") as folder:
        store = write_store(Path(folder) / "store", num_tokens=num_tokens)
        unchecked = without_hashes(store, Path(folder) / "format-1")
        results, checks, notes = {}, {}, []
        for length in lengths:
            checks[str(length)] = measure_checks(store, unchecked, length, tokens_per_turn, repeats)
            with _ways(store, Path(folder), length, tokens_per_turn, others) as (ways, missing):
                results[str(length)] = _compare(ways, length, tokens_per_turn, repeats)
            notes = missing
        resume = measure_resume(Path(folder) / "sparse", repeats=repeats)
    settings = {"num_tokens": num_tokens, "tokens_per_turn": tokens_per_turn, "repeats": repeats}
    return {"settings": settings, "lengths": results, "checks": checks, "resume_s": resume, "notes": notes}


def write_store(path: Path, *, num_tokens: int, seed: int = 0) -> TokenStore:
    """A store of random tokens in one shard; lengths of documents as those of web text, log-normal."""
    generator = np.random.default_rng(seed)
    with StoreWriter(path, _byte_tokenizer(), shard_tokens=-(-num_tokens // 2**16) * 2**16) as writer:
        source = writer.source("text")
        left = num_tokens
        while left > 0:
            length = min(left, int(generator.lognormal(5.0, 1.3)) + 1)
            ids = generator.integers(0, 256, length - 1, dtype=np.uint32)
            source.append(ids, num_bytes=length - 1)
            left -= length
        writer.finish({})
    return TokenStore(path)


def without_hashes(store: TokenStore, path: Path) -> TokenStore:
    """The same files as a store of format 1, whose blocks have no hashes."""
    path.mkdir()
    for entry in store.path.iterdir():
        if entry.name != "zarr.json":
            (path / entry.name).symlink_to(entry)
    metadata = json.loads((store.path / "zarr.json").read_text())
    metadata["attributes"]["format_version"] = 1
    (path / "zarr.json").write_text(json.dumps(metadata))
    return TokenStore(path)


def measure_checks(
    store: TokenStore, unchecked: TokenStore, length: int, tokens_per_turn: int, repeats: int
) -> dict[str, Any]:
    """What it costs to compare blocks with their hashes: the loader's speed as a share of that without hashes.

    ``first``: of windows at random places whose blocks this process has not read yet and the system has not in its page
    cache, by the clock; ``first_cached``: by processor time, when the system has them; ``later``: of the same windows
    again, by processor time. Both stores are read in turns, each time opened anew.
    """
    clocks = {"first": time.perf_counter, "first_cached": time.process_time, "later": time.process_time}
    samples_s: dict[str, dict[str, list[float]]] = {turn: {"format 1": [], "format 2": []} for turn in clocks}
    micro_batch = max(1, _MICRO_BATCH_TOKENS // length)
    for repeat in range(repeats + 1):
        for name, one in (("format 1", unchecked), ("format 2", store)):
            loader = None
            for turn, clock in clocks.items():
                if loader is None or turn != "later":
                    loader = TokenLoader(
                        TokenStore(one.path),
                        sequence_length=length,
                        global_batch_size=micro_batch,
                        micro_batch_size=micro_batch,
                    )
                if turn == "first":
                    _forget(store.path)
                begun = clock()
                for tokens in range(0, tokens_per_turn, loader.step_tokens.full):
                    loader.batches_after(tokens)
                if repeat:
                    samples_s[turn][name].append(clock() - begun)
    shares = {
        turn: statistics.median(samples["format 1"]) / statistics.median(samples["format 2"])
        for turn, samples in samples_s.items()
    }
    reached = {turn: shares[turn] >= least for turn, least in LEAST_OF_UNCHECKED.items()}
    return {"share_of_unchecked": shares, "targets": LEAST_OF_UNCHECKED, "reached": reached, "samples_s": samples_s}


def _forget(path: Path) -> None:
    """Ask the system to drop the files from its page cache; they must be on the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def write_sparse_store(path: Path, *, num_tokens: int = RESUME_TOKENS) -> TokenStore:
    """A store of ``num_tokens`` zeros in 4096 documents whose shard files are holes and take no room."""
    ends = np.linspace(0, num_tokens, 4097).astype("<u8")[1:]
    _write_sparse_array(path / "web" / "tokens", "uint32", num_tokens)
    _write_sparse_array(path / "web" / "doc_ends", "uint64", len(ends), values=ends)
    counts = SourceCounts(documents=len(ends), tokens=num_tokens, bytes=0)
    write_source_attributes(path / "web", "train", counts, {"tokens": [], "doc_ends": []})
    # Of the format without hashes of blocks: nobody wants to hash a terabyte of zeros.
    write_root(path, _byte_tokenizer(), ["web"], {}, format_version=1)
    return TokenStore(path)


def measure_resume(path: Path, *, repeats: int = 5) -> dict[str, float]:
    """Median seconds, by packing, from an open store of 300B tokens to a rank's first 8 × 8,192 in its middle.

    ``open_store``: seconds to open the store, once.
    """
    write_sparse_store(path)
    begun = time.perf_counter()
    store = TokenStore(path)
    taken = {"open_store": time.perf_counter() - begun}
    packings: tuple[Packing, ...] = ("concat", "whole")
    for packing in packings:
        make = partial(_resumed_loader, store, packing, path.parent)
        state = json.dumps(make().state_dict() | dict.fromkeys(("tokens", "position"), 35_000 * 512 * 8192))
        samples = []
        for _ in range(repeats):
            begun = time.perf_counter()
            loader = make()
            loader.load_state_dict(json.loads(state))
            loader.next_step()
            samples.append(time.perf_counter() - begun)
        taken[packing] = statistics.median(samples)
    return taken


def _resumed_loader(store: TokenStore, packing: Packing, index_dir: Path) -> TokenLoader:
    return TokenLoader(
        store,
        sequence_length=8192,
        global_batch_size=512,
        micro_batch_size=8,
        packing=packing,
        layout=LoaderLayout(data_rank=3, data_size=64),
        index_dir=index_dir,
    )


def _compare(ways: dict[str, Read], length: int, tokens_per_turn: int, repeats: int) -> dict[str, Any]:
    samples_s: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, read in ways.items():
            begun = time.process_time()
            read(repeat)
            if repeat:
                samples_s[name].append(time.process_time() - begun)
    median_s = {name: statistics.median(samples) for name, samples in samples_s.items()}
    found: dict[str, Any] = {
        "tokens_per_s_per_core": {name: tokens_per_turn / seconds for name, seconds in median_s.items()},
        "of_memmap": median_s["memmap"] / median_s["loader"],
        "over": {name: seconds / median_s["loader"] for name, seconds in median_s.items() if name != "loader"},
        "samples_s": samples_s,
    }
    if length in LEAST_OF_MEMMAP:
        found["targets"] = {"of_memmap": LEAST_OF_MEMMAP[length], "over_zarr": LEAST_OVER_ZARR[length]}
        found["reached"] = (
            found["of_memmap"] >= LEAST_OF_MEMMAP[length] and found["over"]["zarr"] >= LEAST_OVER_ZARR[length]
        )
    return found


@contextmanager
def _ways(
    store: TokenStore, folder: Path, length: int, tokens_per_turn: int, others: bool
) -> Iterator[tuple[dict[str, Read], list[str]]]:
    """The ways that are installed, and a line for each that is not."""
    micro_batch = max(1, _MICRO_BATCH_TOKENS // length)
    loader = TokenLoader(store, sequence_length=length, global_batch_size=micro_batch, micro_batch_size=micro_batch)
    num_steps = max(1, tokens_per_turn // loader.step_tokens.full)

    def steps(turn: int) -> Iterator[int]:
        return (loader.step_tokens.after(number) for number in range(turn * num_steps, (turn + 1) * num_steps))

    def starts(turn: int) -> list[int]:
        return [found.window * length for tokens in steps(turn) for found in loader.step_after(tokens).locations]

    def load(turn: int) -> None:
        for tokens in steps(turn):
            loader.batches_after(tokens)

    def load_positions(turn: int) -> None:
        for tokens in steps(turn):
            for batch in loader.batches_after(tokens):
                assert batch.positions is not None

    turns = {turn: starts(turn) for turn in range(64)}
    source = store.source("text")
    raw = np.memmap(store.path / "text" / "tokens" / "c" / "0", dtype="<u4", mode="r", shape=(source.num_tokens,))
    mapped = raw.view(np.ndarray)  # a memmap's own slices are slower
    array = zarr.open_array(store.path / "text" / "tokens", mode="r")

    def through(read: Callable[[int], object]) -> Read:
        def read_turn(turn: int) -> None:
            for start in turns[turn]:
                read(start)

        return read_turn

    ways: dict[str, Read] = {
        "loader": load,
        "loader_positions": load_positions,
        "memmap": through(lambda start: np.array(mapped[start : start + length + 1])),
        "zarr": through(lambda start: array[start : start + length + 1]),
    }
    missing = []
    for name, make in (("megatron", _megatron), ("mosaic", _mosaic)) if others else ():
        try:
            ways[name] = through(make(mapped, folder / f"{name}-{length}", length))
        except ImportError as error:
            missing.append(f"{name} is skipped: {error}")
    yield ways, missing


def _megatron(tokens: NDArray[np.uint32], path: Path, length: int) -> Callable[[int], object]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder  # noqa: PLC0415

    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
    builder.add_document(torch.from_numpy(tokens.astype(np.int32)), [len(tokens)])
    builder.finalize(f"{path}.idx")
    dataset = IndexedDataset(str(path), mmap=True)
    return lambda start: torch.from_numpy(dataset.get(0, offset=start, length=length + 1).astype(np.int64))


def _mosaic(tokens: NDArray[np.uint32], path: Path, length: int) -> Callable[[int], object]:
    from streaming import LocalDataset, MDSWriter  # noqa: PLC0415 - optional

    num_windows = (len(tokens) - 1) // length
    with MDSWriter(out=str(path), columns={"tokens": "ndarray:uint32"}) as writer:
        for window in range(num_windows):
            writer.write({"tokens": tokens[window * length : (window + 1) * length + 1].copy()})
    dataset = LocalDataset(str(path))
    return lambda start: torch.from_numpy(dataset[start // length]["tokens"].astype(np.int64))


def _write_sparse_array(directory: Path, dtype: str, length: int, *, values: NDArray[Any] | None = None) -> None:
    layout = ShardLayout(dtype=dtype, shard_length=_SPARSE_SHARD, chunk_length=_SPARSE_CHUNK)
    for shard in range(-(-length // _SPARSE_SHARD)):
        path = layout.path(directory, shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        num_values = min(_SPARSE_SHARD, length - shard * _SPARSE_SHARD)
        with path.open("wb") as file:
            if values is not None:
                file.write(values.tobytes())
            file.seek(layout.padded_bytes(num_values))
            file.write(layout.index(num_values))
    write_metadata(directory, layout, length)


def _byte_tokenizer() -> TiktokenTokenizer:
    ranks = {bytes([byte]): byte for byte in range(256)}
    return TiktokenTokenizer(
        name="bytes", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )


def main() -> None:
    """Print everything as JSON."""
    torch.set_num_threads(1)
    print(json.dumps(run()))


if __name__ == "__main__":
    main()
