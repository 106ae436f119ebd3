"""A token store on disk: a zarr v3 group with one group per source, written once, whole or not at all.

    STORE/zarr.json                      format, tokenizer, sources and their weights, names of classes; written last
    STORE/SOURCE/zarr.json               split, counts, hashes
    STORE/SOURCE/tokens/                 uint32, (tokens,): every document as [end-of-text, t1, …, tn]
    STORE/SOURCE/doc_ends/               uint64, (documents,): where each document ends in tokens, ascending
    STORE/SOURCE/hashes/ARRAY/           uint64: hashes of the blocks of each array (``blocks.py``)
    STORE/tokenizer/                     the tokenizer, complete
    STORE/report.json, report.html       the counts of the preparation, for programs and for browsers

and, if the store has them:

    STORE/SOURCE/loss_mask/              uint8, (tokens,): 1 where the token counts as a label
    STORE/SOURCE/per_token.NAME/         (tokens,) or (tokens, width): values for each token (``reference.py`` adds one)
    STORE/SOURCE/documents.NAME/         (documents,) or (documents, width): values of a task for each document
    STORE/SOURCE/origins/                uint32, (documents, 4): where each document came from (``origins.py``)
    STORE/SOURCE/ids/, id_ends/          uint8, uint64: the ids or URLs that documents had, one after another
    STORE/input_files/                   the names and sizes of the files that the documents came from
    STORE/document_keys/                 keys to find duplicates of its documents in other files (``document_keys.py``)

A store of images has documents of the end-of-text token alone. Their pixels are documents.image, uint8 rows of height x
width x channels numbers, row of pixels after row; ``image_shape`` of the store's attributes has these extents. Latents
are float16 or float32 in its place.

Hashes are XXH3-128: one for every shard file, and one for a source. The latter is the hash of its shards' hashes
(binary, those of tokens, then those of doc_ends, loss_mask and documents.NAME), so that several writers can compute it
without a second read. Hashes of blocks and origins are no part of it: the same tokens are the same data in any format.

Format 1 had neither hashes of blocks nor the second list. It can be read, and ``upgrade.py`` makes it format 2.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import xxhash
import zarr

from lightscale import __version__
from lightscale.data_pipeline.store.blocks import BLOCK_BYTES
from lightscale.data_pipeline.store.shards import DTYPES, ShardHashes, ShardLayout, is_count, read_json, write_metadata
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.data_pipeline.whole_files import sync_tree
from lightscale.errors import UserError
from lightscale.files import sync

FORMAT = "lightscale-token-store"
FORMAT_VERSION = 2
CHECKED_SINCE = 2
"""The first format whose blocks have hashes."""
SHARD_TOKENS = 64 * 2**20
CHUNK_TOKENS = 64 * 2**10
REPORT_FILE, HTML_REPORT_FILE = "report.json", "report.html"
VALIDATION_SUFFIX = "-validation"
TOKENIZER_DIR = "tokenizer"
INPUT_FILES_DIR = "input_files"
HASHES_DIR = "hashes"
KEYS_DIR = "document_keys"
LOSS_MASK, ORIGINS, IDS, ID_ENDS = "loss_mask", "origins", "ids", "id_ends"
DOCUMENTS_PREFIX = "documents."
"""Begins the names of the arrays that a task has of documents."""
TOKENS_PREFIX = "per_token."
"""Begins the names of the arrays with a value for each token, but for that of ``LOSS_MASK``."""
REFERENCE = "reference_log_probability"
"""The one of them with the log-probability that a reference model gives each token that counts, 0 elsewhere."""
LABEL = "label"
"""The one of them with the class of each, a number from 0 on, that preparations write."""
IMAGE = "image"
"""The one of them with the pixels of each, in a store of images."""
_ARRAY_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# Documents are far fewer than tokens; shorter zarr chunks waste less room at the end of an array.
_TOKENS_PER_DOCUMENT = 16
_MAX_VOCAB_SIZE = 2**31 - 1
# No longer than names of directories can be.
_SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_RESERVED_NAMES = frozenset({TOKENIZER_DIR, INPUT_FILES_DIR, KEYS_DIR, REPORT_FILE, HTML_REPORT_FILE, "zarr.json"})
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


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
    """Documents, tokens and bytes of a source; its end-of-text tokens count as tokens."""

    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class StoreRoot:
    """The content of the ``zarr.json`` of a store."""

    format_version: int
    tokenizer: TokenizerIdentity
    sources: list[str]
    weights: dict[str, float] | None
    """Default share of every training source in the samples; none: by their tokens."""
    classes: dict[str, list[str]]
    """Names of the classes that arrays of documents hold the numbers of, by array."""
    image_shape: tuple[int, int, int] | None
    """(height, width, channels) of the images that its documents are; None: they are texts."""

    @property
    def is_checked(self) -> bool:
        """Whether its blocks have hashes."""
        return self.format_version >= CHECKED_SINCE


def array_layouts(shard_length: int, chunk_length: int) -> dict[str, ShardLayout]:
    """The layouts of a source's own arrays, by name; ``shard_length`` and ``chunk_length`` in tokens."""
    of_tokens = {"shard_length": shard_length, "chunk_length": chunk_length}
    per_document = _per_document(shard_length, chunk_length)
    return {
        "tokens": ShardLayout(dtype="uint32", **of_tokens),
        "doc_ends": ShardLayout(dtype="uint64", **of_tokens),
        LOSS_MASK: ShardLayout(dtype="uint8", **of_tokens),
        ORIGINS: ShardLayout(dtype="uint32", width=4, **per_document),
        IDS: ShardLayout(dtype="uint8", **of_tokens),
        ID_ENDS: ShardLayout(dtype="uint64", **per_document),
    }


def document_layout(name: str, dtype: np.dtype[Any], shard_length: int, chunk_length: int) -> ShardLayout:
    """The layout of the array ``name`` that a task has of its documents; a ``dtype`` of (base, (width,)) makes rows.

    ``ValueError`` for a name or a type that a store cannot hold.
    """
    return _layout("document", name, dtype, _per_document(shard_length, chunk_length))


def token_layout(name: str, dtype: np.dtype[Any], shard_length: int, chunk_length: int) -> ShardLayout:
    """The layout of the array ``name`` with a value for each token; ``dtype`` and errors as in ``document_layout``."""
    return _layout("token", name, dtype, {"shard_length": shard_length, "chunk_length": chunk_length})


def token_array(name: str) -> str:
    """The directory in its source of the array ``name`` with a value for each token."""
    return name if name == LOSS_MASK else TOKENS_PREFIX + name


def _layout(kind: str, name: str, dtype: np.dtype[Any], lengths: Mapping[str, int]) -> ShardLayout:
    if not _ARRAY_NAME.fullmatch(name):
        raise ValueError(f"{kind} array {name!r}: a name starts with a letter, followed by letters, digits and '_'")
    if dtype.base.name not in DTYPES or len(dtype.shape) > 1:
        raise ValueError(f"{kind} array {name!r} of {dtype}: use one of {', '.join(DTYPES)}, or rows of one")
    return ShardLayout(dtype=dtype.base.name, width=dtype.shape[0] if dtype.shape else None, **lengths)


def _per_document(shard_length: int, chunk_length: int) -> dict[str, int]:
    length = max(1, chunk_length // _TOKENS_PER_DOCUMENT)
    return {"shard_length": shard_length // chunk_length * length, "chunk_length": length}


def check_source_name(name: str) -> None:
    """``UserError`` where ``name`` cannot be that of a source."""
    if not _SOURCE_NAME.fullmatch(name) or name in _RESERVED_NAMES:
        raise UserError(
            f"source name {name!r}: a name starts with a letter or digit, followed by letters, digits, '_', '.' and "
            f"'-', at most 255 in all; {', '.join(sorted(_RESERVED_NAMES))} are reserved"
        )


def hash_of_hashes(hashes: Sequence[str]) -> str:
    """The content hash of a source from those of its shards."""
    # Of hashes and not of the content: each shard is hashed by the process that writes it, and nothing is read again.
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(digest) for digest in hashes))


def content_hash(shard_hashes: Mapping[str, Sequence[str]]) -> str:
    """That of a source, from the hashes of its arrays' shards: of all that it is trained on."""
    prefixes = (DOCUMENTS_PREFIX, TOKENS_PREFIX)
    tasks = sorted(name for name in shard_hashes if name == LOSS_MASK or name.startswith(prefixes))
    return hash_of_hashes([digest for name in ("tokens", "doc_ends", *tasks) for digest in shard_hashes[name]])


def write_source_attributes(
    directory: Path,
    split: Split,
    counts: SourceCounts,
    hashes: Mapping[str, Sequence[ShardHashes]],
    *,
    chat: Mapping[str, Any] | None = None,
    pairs: bool = False,
) -> None:
    """The ``zarr.json`` of a source whose arrays are there; ``hashes``: by array, of its shards in order.

    ``chat``: of conversations all that decided their texts and loss masks; none: its documents are texts. ``pairs``:
    whether two texts at a time belong together; of preferences ``chat`` records that.
    """
    of_hashes = hash_attributes(hashes)
    attributes = {
        "split": split,
        **asdict(counts),
        "content_hash": content_hash(of_hashes["shard_hashes"]),
        **of_hashes,
        **({"chat": dict(chat)} if chat else {}),
        **({"pairs": True} if pairs else {}),
    }
    write_group(directory, attributes)


def hash_attributes(hashes: Mapping[str, Sequence[ShardHashes]]) -> dict[str, Any]:
    """The attributes of a group about the hashes of its arrays."""
    return {
        "shard_hashes": {name: [one.shard for one in shards] for name, shards in hashes.items()},
        "block_bytes": BLOCK_BYTES,
        "block_hashes": {
            name: {"shards": [one.blocks for one in shards], "digests": [one.digests for one in shards]}
            for name, shards in hashes.items()
        },
    }


def write_array_metadata(group: Path, name: str, layout: ShardLayout, length: int) -> None:
    """The ``zarr.json`` of an array of ``length`` values, and of that of its block hashes; their shards are there."""
    for directory, one, size in (
        (group / name, layout, length),
        (group / HASHES_DIR / name, layout.hashes, layout.num_hashes(length)),
    ):
        (directory / "zarr.json").unlink(missing_ok=True)  # of an interrupted attempt
        write_metadata(directory, one, size)


def write_group(directory: Path, attributes: Mapping[str, Any]) -> None:
    """The ``zarr.json`` of a group of arrays with hashes of blocks, and of the group of those."""
    for path, content in ((directory / HASHES_DIR, {}), (directory, attributes)):
        (path / "zarr.json").unlink(missing_ok=True)  # of an interrupted attempt
        zarr.create_group(path, attributes=dict(content), zarr_format=3)


def write_root(
    directory: Path,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    report: Mapping[str, Any],
    *,
    weights: Mapping[str, float] | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    image_shape: tuple[int, int, int] | None = None,
    format_version: int = FORMAT_VERSION,
) -> None:
    """Tokenizer, report and last the ``zarr.json`` of a store whose ``sources`` are there.

    ``weights``: default share of every source in the training samples; none: by their tokens. ``classes``: names of the
    classes whose numbers an array of documents holds, by array. ``image_shape``: (height, width, channels) of documents
    that are images. ``format_version`` 1: of a store without hashes of blocks, for measurements.
    """
    (directory / TOKENIZER_DIR).mkdir(exist_ok=True)
    tokenizer.save(directory / TOKENIZER_DIR)
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    (directory / REPORT_FILE).write_text(text, encoding="utf-8")
    # Last, because a directory without zarr.json is no store: an interrupted write is never taken for one.
    attributes = {
        "format": FORMAT,
        "format_version": format_version,
        "created_by": f"lightscale {__version__}",
        "tokenizer": asdict(TokenizerIdentity.of(tokenizer)),
        "sources": list(sources),
        **({"weights": dict(weights)} if weights else {}),
        **({"classes": {array: list(names) for array, names in classes.items()}} if classes else {}),
        **({"image_shape": list(image_shape)} if image_shape else {}),
    }
    zarr.create_group(directory, attributes=attributes, zarr_format=3)


def read_attributes(path: Path) -> dict[str, Any]:
    """The attributes of the group whose ``zarr.json`` is ``path``; ``UserError`` where it has none."""
    metadata = read_json(path)
    attributes = metadata.get("attributes")
    if metadata.get("node_type") != "group" or not isinstance(attributes, dict):
        raise UserError(f"{path}: not the metadata of a zarr v3 group with attributes; the store is damaged")
    return attributes


def read_root(path: Path) -> StoreRoot:
    """The description of the store at ``path``.

    Raises ``UserError`` if there is no store, or one of another version or with invalid contents.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no token store; `lightscale data prepare` writes one")
    metadata_path = path / "zarr.json"
    if not metadata_path.exists():
        raise UserError(f"{path}: it has no zarr.json; `lightscale data prepare` writes token stores")
    attributes = read_attributes(metadata_path)
    if attributes.get("format") != FORMAT:
        raise UserError(f"{metadata_path}: format {attributes.get('format')!r} instead of {FORMAT!r}")
    version = attributes.get("format_version")
    if not is_count(version) or not 1 <= version <= FORMAT_VERSION:
        raise UserError(
            f"{metadata_path}: format version {version}, this version of lightscale reads 1 to {FORMAT_VERSION}; "
            f"prepare the store again, or use the version that wrote it"
        )
    sources = _source_names(metadata_path, attributes.get("sources"))
    return StoreRoot(
        format_version=version,
        tokenizer=_tokenizer_identity(metadata_path, attributes.get("tokenizer")),
        sources=sources,
        # Format 1 kept the weights of sources without documents.
        weights=_weights(metadata_path, attributes.get("weights"), sources if version >= CHECKED_SINCE else None),
        classes=_classes(metadata_path, attributes.get("classes", {})),
        image_shape=_image_shape(metadata_path, attributes.get("image_shape")),
    )


def _source_names(path: Path, names: Any) -> list[str]:
    """The directories of the sources. A name out of a file must not lead out of the store."""
    if not isinstance(names, list) or not names:
        raise UserError(f"{path}: sources = {names!r}: must be a list of names; the store is damaged")
    for name in names:
        if not isinstance(name, str) or not _SOURCE_NAME.fullmatch(name) or name == TOKENIZER_DIR:
            raise UserError(f"{path}: sources: {name!r} is not a valid source name; the store is damaged")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path}: sources: {twice!r} is listed twice; the store is damaged")
    return names


def _tokenizer_identity(path: Path, content: Any) -> TokenizerIdentity:
    try:
        identity = TokenizerIdentity(**content)
    except TypeError as error:
        raise UserError(f"{path}: damaged attributes (tokenizer: {error})") from error
    if not isinstance(identity.name, str) or not isinstance(identity.sha256, str):
        raise UserError(f"{path}: tokenizer: name and sha256 must be strings; the store is damaged")
    if not is_count(identity.vocab_size) or not 1 <= identity.vocab_size <= _MAX_VOCAB_SIZE:
        raise UserError(f"{path}: tokenizer: vocab_size = {identity.vocab_size!r}: must be 1 to {_MAX_VOCAB_SIZE}")
    if not is_count(identity.eot_id) or identity.eot_id >= identity.vocab_size:
        raise UserError(
            f"{path}: tokenizer: eot_id = {identity.eot_id!r}: must be an id below vocab_size = {identity.vocab_size}"
        )
    return identity


def _weights(path: Path, weights: Any, sources: Sequence[str] | None) -> dict[str, float] | None:
    if weights is None or weights == {}:
        return None
    if not isinstance(weights, dict):
        raise UserError(f"{path}: weights = {weights!r}: must be a table of source and share; the store is damaged")
    for name, weight in weights.items():
        if sources is not None and name not in sources:
            raise UserError(f"{path}: weights: no source {name!r}; there are {', '.join(sources)}")
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not 0 < weight <= sys.float_info.max:
            raise UserError(f"{path}: weights: {name} = {weight!r}: must be a number above 0; the store is damaged")
    return {name: float(weight) for name, weight in weights.items()}


def _classes(path: Path, classes: Any) -> dict[str, list[str]]:
    if not isinstance(classes, dict):
        raise UserError(f"{path}: classes = {classes!r}: must be a table of array and names; the store is damaged")
    for array, names in classes.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{path}: classes: {array}: must be a list of names; the store is damaged")
    return classes


def _image_shape(path: Path, shape: Any) -> tuple[int, int, int] | None:
    if shape is None:
        return None
    if not isinstance(shape, list) or len(shape) != 3 or not all(is_count(one) and one >= 1 for one in shape):
        raise UserError(
            f"{path}: image_shape = {shape!r}: must be [height, width, channels] in pixels; the store is damaged"
        )
    height, width, channels = shape
    return height, width, channels


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
