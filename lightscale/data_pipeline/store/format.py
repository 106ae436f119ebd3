"""What a token store is on disk: a zarr v3 group with one group per source, written once, whole or not at all.

    STORE/zarr.json                      format, tokenizer, names and weights of the sources; written last
    STORE/SOURCE/zarr.json               split, counts, hashes
    STORE/SOURCE/tokens/                 uint32, (tokens,): every document as [end-of-text, t1, …, tn]
    STORE/SOURCE/doc_ends/               uint64, (documents,): where each document ends in tokens, ascending
    STORE/tokenizer/                     the tokenizer, complete
    STORE/report.json, report.html       what the preparation counted, for programs and for browsers

Hashes are XXH3-128: one for every shard file, and one of a source: the hash of its shards' hashes (binary,
those of tokens, then those of doc_ends), so that several writers can make it without reading anything twice.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import xxhash
import zarr

from lightscale import __version__
from lightscale.data_pipeline.store.shards import ShardLayout, read_json
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.data_pipeline.whole_files import sync, sync_tree
from lightscale.errors import UserError

FORMAT = "lightscale-token-store"
FORMAT_VERSION = 1
SHARD_TOKENS = 64 * 2**20
CHUNK_TOKENS = 64 * 2**10
REPORT_FILE, HTML_REPORT_FILE = "report.json", "report.html"
VALIDATION_SUFFIX = "-validation"
TOKENIZER_DIR = "tokenizer"
_SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_RESERVED_NAMES = frozenset({TOKENIZER_DIR, REPORT_FILE, HTML_REPORT_FILE, "zarr.json"})
Split = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class TokenizerIdentity:
    """Which tokenizer a store was written with."""

    name: str
    sha256: str
    eot_id: int
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """That of ``tokenizer``."""
        return cls(
            name=tokenizer.name, sha256=tokenizer.sha256, eot_id=tokenizer.eot_id, vocab_size=tokenizer.vocab_size
        )


@dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """How much a source holds; its end-of-text tokens count as tokens."""

    documents: int
    tokens: int
    bytes: int


def array_layouts(shard_length: int, chunk_length: int) -> dict[str, ShardLayout]:
    """The layouts of a source's two arrays."""
    return {
        name: ShardLayout(dtype=dtype, shard_length=shard_length, chunk_length=chunk_length)
        for name, dtype in (("tokens", "uint32"), ("doc_ends", "uint64"))
    }


def check_source_name(name: str) -> None:
    """``UserError`` where ``name`` cannot be that of a source."""
    if not _SOURCE_NAME.fullmatch(name) or name in _RESERVED_NAMES:
        raise UserError(
            f"source name {name!r}: a name is a letter or digit, then letters, digits, '_', '.' and '-'; "
            f"{', '.join(sorted(_RESERVED_NAMES))} are reserved"
        )


def hash_of_hashes(hashes: Sequence[str]) -> str:
    """The content hash of a source from those of its shards."""
    # Of hashes and not of the content: each shard is hashed by the process that writes it, and nothing is read again.
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(digest) for digest in hashes))


def write_source_attributes(
    directory: Path, split: Split, counts: SourceCounts, shard_hashes: Mapping[str, list[str]]
) -> None:
    """The ``zarr.json`` of a source whose arrays are there; ``shard_hashes``: those of tokens and doc_ends."""
    attributes = {
        "split": split,
        **asdict(counts),
        "content_hash": hash_of_hashes([*shard_hashes["tokens"], *shard_hashes["doc_ends"]]),
        "shard_hashes": dict(shard_hashes),
    }
    zarr.create_group(directory, attributes=attributes, zarr_format=3)


def write_root(
    directory: Path,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    report: Mapping[str, Any],
    *,
    weights: Mapping[str, float] | None = None,
) -> None:
    """Tokenizer, report and last the ``zarr.json`` of a store whose ``sources`` are there.

    ``weights``: default share of every source in the training samples; none: by their tokens.
    """
    (directory / TOKENIZER_DIR).mkdir(exist_ok=True)
    tokenizer.save(directory / TOKENIZER_DIR)
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    (directory / REPORT_FILE).write_text(text, encoding="utf-8")
    # Last, because a directory without zarr.json is no store: an interrupted write is never taken for one.
    attributes = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created_by": f"lightscale {__version__}",
        "tokenizer": asdict(TokenizerIdentity.of(tokenizer)),
        "sources": list(sources),
        **({"weights": dict(weights)} if weights else {}),
    }
    zarr.create_group(directory, attributes=attributes, zarr_format=3)


def read_attributes(path: Path) -> dict[str, Any]:
    """The attributes of the group whose ``zarr.json`` is ``path``; ``UserError`` where it has none."""
    metadata = read_json(path)
    attributes = metadata.get("attributes")
    if metadata.get("node_type") != "group" or not isinstance(attributes, dict):
        raise UserError(f"{path}: not the metadata of a zarr v3 group with attributes; the store is damaged")
    return attributes


def read_root(path: Path) -> tuple[TokenizerIdentity, list[str], dict[str, float] | None]:
    """Tokenizer, names of the sources and weights of the store at ``path``.

    ``UserError`` where there is no store, or one of another version.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no token store there; `lightscale data prepare` writes one")
    metadata_path = path / "zarr.json"
    if not metadata_path.exists():
        raise UserError(f"{path}: it has no zarr.json; `lightscale data prepare` writes token stores")
    attributes = read_attributes(metadata_path)
    if attributes.get("format") != FORMAT:
        raise UserError(f"{metadata_path}: format {attributes.get('format')!r} instead of {FORMAT!r}")
    if attributes.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{metadata_path}: format version {attributes.get('format_version')}, this lightscale reads "
            f"{FORMAT_VERSION}; prepare the store again"
        )
    try:
        weights = attributes.get("weights")
        return (
            TokenizerIdentity(**attributes["tokenizer"]),
            [str(name) for name in attributes["sources"]],
            {str(name): float(weight) for name, weight in weights.items()} if weights else None,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{metadata_path}: damaged attributes ({error!r})") from error


def require_absent(path: Path) -> None:
    """``UserError`` if there is something at ``path`` other than an empty directory."""
    is_empty_dir = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if (path.exists() or path.is_symlink()) and not is_empty_dir:
        raise UserError(f"{path}: it exists and is never overwritten; remove it or use another path")


def publish(temporary: Path, path: Path) -> None:
    """Bring the store in ``temporary`` to the disk and give it its name, by one rename."""
    # Content before name: after a power failure the name must not lead to files that never reached the disk.
    sync_tree(temporary)
    require_absent(path)  # another process may have written it meanwhile
    temporary.rename(path)
    sync(path.parent)
