"""Verifies a store: every shard's hash, the document ends, the range of the tokens, the tokenizer."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lightscale.data_pipeline.executors import Progress, ProgressMeter
from lightscale.data_pipeline.store.format import TokenizerIdentity, hash_of_hashes, read_root
from lightscale.data_pipeline.store.shards import read_json, shard_path
from lightscale.data_pipeline.store.token_store import TokenSource, source_identity
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.errors import UserError

_ARRAYS = ("tokens", "doc_ends")
_READ_BYTES = 2**23
_READ_VALUES = 2**21
_STEP = "verify"


@dataclass(kw_only=True)
class Verification:
    """What was checked, and what is wrong."""

    store: Path
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Split, counts and content hash of the sources in which nothing is wrong."""
    num_shards: int = 0
    num_bytes: int = 0
    faults: list[str] = field(default_factory=list)
    """One line each: the file, what was found, what was written."""


def verify_store(path: Path, progress: Progress) -> Verification:
    """Read all of the store at ``path``.

    ``UserError`` where there is no store, or one of another version; all else that is wrong is in ``faults``.
    """
    tokenizer, names, _ = read_root(path)
    verification = Verification(store=path)
    faults = verification.faults
    try:
        if load_tokenizer(path).sha256 != tokenizer.sha256:
            faults.append(
                f"{path / 'tokenizer'}: not the tokenizer with sha256 {tokenizer.sha256} of {path / 'zarr.json'}"
            )
    except UserError as error:
        faults.append(str(error))
    files = (file for name in names for file in (path / name).glob("*/c/*"))
    meter = ProgressMeter(_STEP, sum(file.stat().st_size for file in files), progress)
    for name in names:
        before = len(faults)
        faults.extend(_shard_faults(path / name, verification, meter))
        try:
            source = TokenSource(path / name, name)
            if len(faults) == before:  # values of damaged shards would only repeat the fault
                faults.extend(_value_faults(source, path / name, tokenizer))
        except UserError as error:
            if str(error) not in faults:
                faults.append(str(error))
            continue
        if len(faults) == before:
            verification.sources[name] = source_identity(source)
    return verification


def _shard_faults(directory: Path, verification: Verification, meter: ProgressMeter) -> Iterator[str]:
    """Files that do not have the hash that the source says, and files it does not know."""
    try:
        attributes = read_json(directory / "zarr.json")["attributes"]
        written = {array: list(attributes["shard_hashes"][array]) for array in _ARRAYS}
        content_hash = attributes["content_hash"]
    except UserError as error:
        yield str(error)
        return
    except (KeyError, TypeError) as error:
        yield f"{directory / 'zarr.json'}: damaged attributes ({error!r})"
        return
    if hash_of_hashes([*written["tokens"], *written["doc_ends"]]) != content_hash:
        yield f"{directory / 'zarr.json'}: content_hash {content_hash} is not that of its shard_hashes"
    for array, hashes in written.items():
        known = {shard_path(directory / array, number) for number in range(len(hashes))}
        for file in sorted(set((directory / array / "c").glob("*")) - known):
            yield f"{file}: not a shard of this store"
        for number, expected in enumerate(hashes):
            file = shard_path(directory / array, number)
            try:
                found = _hash(file, verification, meter)
            except OSError as error:
                yield f"{file}: {error.strerror}; a shard is missing"
                continue
            if found != expected:
                yield f"{file}: content hash {found}, {expected} when it was written; the shard is damaged"


def _hash(file: Path, verification: Verification, meter: ProgressMeter) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as raw:
        while data := raw.read(_READ_BYTES):
            digest.update(data)
            verification.num_bytes += len(data)
            meter.advance(len(data))
    verification.num_shards += 1
    return digest.hexdigest()


def _value_faults(source: TokenSource, directory: Path, tokenizer: TokenizerIdentity) -> Iterator[str]:
    """Ends that do not ascend, ids beyond the vocabulary, end-of-text tokens that do not begin documents."""
    # Hashes hold what was written; these checks hold that what was written makes sense.
    begin = 0
    for first in range(0, source.num_documents, _READ_VALUES):
        ends = source.document_ends(first, min(first + _READ_VALUES, source.num_documents))
        starts = np.concatenate([[begin], ends[:-1]])
        if len(wrong := np.flatnonzero(ends <= starts)):
            at = int(wrong[0])
            yield f"{directory / 'doc_ends'}: document {first + at} ends at {ends[at]}, the one before at {starts[at]}"
            return
        begin = int(ends[-1])
    for first in range(0, source.num_tokens, _READ_VALUES):
        last = min(first + _READ_VALUES, source.num_tokens)
        tokens = source.read(first, last)
        if len(wrong := np.flatnonzero(tokens >= tokenizer.vocab_size)):
            at = int(wrong[0])
            yield f"{directory / 'tokens'}: token {first + at} is {tokens[at]}, ids end at {tokenizer.vocab_size - 1}"
        starts = source.document_starts(first, last)
        found = np.flatnonzero(tokens == tokenizer.eot_id) + first
        if not np.array_equal(found, starts[starts >= first]):
            token = np.setxor1d(found, starts[starts >= first])[0]
            yield f"{directory / 'tokens'}: token {token} begins a document or is end of text, but not both"
            return
