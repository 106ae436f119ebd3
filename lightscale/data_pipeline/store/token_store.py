"""Token stores: written from documents, one process and one stream, or opened for reading.

``format.py`` describes the files; ``preparation/assemble.py`` writes the same with many processes.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from lightscale.data_pipeline.store.array_group import ArrayGroup
from lightscale.data_pipeline.store.format import (
    CHUNK_TOKENS,
    DOCUMENTS_PREFIX,
    HASHES_DIR,
    IMAGE,
    INPUT_FILES_DIR,
    LABEL,
    LOSS_MASK,
    ORIGINS,
    REFERENCE,
    REPORT_FILE,
    SHARD_TOKENS,
    SPLITS,
    TOKENS_PREFIX,
    SourceCounts,
    Split,
    TokenizerIdentity,
    array_layouts,
    check_source_name,
    content_hash,
    document_layout,
    publish,
    read_root,
    require_absent,
    token_array,
    token_layout,
    write_root,
    write_source_attributes,
)
from lightscale.data_pipeline.store.origins import InputFiles, Origin, Origins
from lightscale.data_pipeline.store.sharded_array import ShardedArray
from lightscale.data_pipeline.store.shards import ShardWriter, read_json
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.data_pipeline.whole_files import DISK_FULL_ERRNOS
from lightscale.errors import UserError, remedy_of_limit

_BUFFER_TOKENS = 2**18
# Of what is hashed: checkpoints of all formats of stores have this one.
_FINGERPRINT_VERSION = 1


class SourceWriter:
    """Appends documents to one source of a store; made by ``StoreWriter.source``."""

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        split: Split,
        layout: tuple[int, int],
        *,
        has_loss_mask: bool,
        pairs: bool,
        tokens: Mapping[str, DTypeLike],
        documents: Mapping[str, DTypeLike],
    ) -> None:
        self._directory, self._pairs = directory, pairs
        self._split = split
        self._eot = np.array([tokenizer.eot_id], dtype=np.uint32)
        self._vocab_size = tokenizer.vocab_size
        layouts = {name: array_layouts(*layout)[name] for name in ("tokens", "doc_ends")}
        if has_loss_mask:
            layouts[LOSS_MASK] = array_layouts(*layout)[LOSS_MASK]
        if LOSS_MASK in tokens:
            raise ValueError(f"tokens: {LOSS_MASK}: create the source with has_loss_mask")
        for name, dtype in tokens.items():
            layouts[token_array(name)] = token_layout(name, np.dtype(dtype), *layout)
        for name, dtype in documents.items():
            layouts[DOCUMENTS_PREFIX + name] = document_layout(name, np.dtype(dtype), *layout)
        self._token_arrays, self._document_arrays = frozenset(tokens), frozenset(documents)
        self._writers = {
            name: ShardWriter(directory / name, one, hashes=directory / HASHES_DIR / name)
            for name, one in layouts.items()
        }
        self._waiting: dict[str, list[NDArray[Any]]] = {name: [] for name in layouts}
        self._num_waiting = 0
        # The end of a text counts where the token before it does; nothing comes before the first.
        self._end_counts = np.ones(1, dtype=np.uint8)
        self.num_documents = 0
        self.num_tokens = 0
        self.num_bytes = 0

    def append(
        self,
        ids: ArrayLike,
        *,
        num_bytes: int,
        loss_mask: ArrayLike | None = None,
        tokens: Mapping[str, ArrayLike] | None = None,
        documents: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Add a document: its (n,) ``ids`` without special ones, and the UTF-8 bytes of its text.

        ``loss_mask``: (n,) of 0 and 1, whether each token counts as a label; none: all do. The end of the document
        counts where its last token does. ``tokens``: (n + 1,) or (n + 1, width) values for each of the source's arrays
        of tokens; the first is that of the end-of-text token before the document. ``documents``: a value for each of
        the source's arrays of documents. ``ValueError`` for a mask or values that the source does not take.
        """
        ids = np.asarray(ids, dtype=np.uint32)
        given, of_tokens = dict(documents or {}), dict(tokens or {})
        for what, found, own in (
            ("tokens", of_tokens, self._token_arrays),
            ("documents", given, self._document_arrays),
        ):
            if found.keys() != own:
                raise ValueError(f"{what} {sorted(found)}: the source has {sorted(own)}")
        if loss_mask is not None and LOSS_MASK not in self._waiting:
            raise ValueError("loss_mask: the source has no loss mask; create the source with has_loss_mask")
        rows = {DOCUMENTS_PREFIX + name: self._values("documents", name, value) for name, value in given.items()}
        for name, values in of_tokens.items():
            rows[token_array(name)] = self._values("tokens", name, values, length=len(ids) + 1)
        self._waiting["tokens"] += (self._eot, ids)
        if LOSS_MASK in self._waiting:
            mask = _checked_mask(loss_mask, len(ids))
            self._waiting[LOSS_MASK] += (self._end_counts, mask)
            self._end_counts = mask[-1:] if len(mask) else self._end_counts
        for array, row in rows.items():
            self._waiting[array].append(row)
        self.num_tokens += len(ids) + 1
        self.num_documents += 1
        self.num_bytes += num_bytes
        self._waiting["doc_ends"].append(np.array([self.num_tokens], dtype=np.uint64))
        self._num_waiting += len(ids) + 1
        if self._num_waiting >= _BUFFER_TOKENS:
            self.flush()

    def finish(self) -> None:
        """Complete the arrays and write the source's attributes. ``ValueError`` for half a pair."""
        if self._pairs and self.num_documents % 2:
            raise ValueError(f"pairs: {self.num_documents} documents; append two of each pair, one after the other")
        self.flush()
        for writer in self._writers.values():
            writer.close()
        counts = SourceCounts(documents=self.num_documents, tokens=self.num_tokens, bytes=self.num_bytes)
        hashes = {name: writer.shard_hashes for name, writer in self._writers.items()}
        write_source_attributes(self._directory, self._split, counts, hashes, pairs=self._pairs)

    def abandon(self) -> None:
        """Close open files after an error."""
        for writer in self._writers.values():
            writer.abandon()

    def flush(self) -> None:
        """Write out the appended values."""
        if not self._num_waiting:
            return
        for name, waiting in self._waiting.items():
            values = np.concatenate(waiting)
            if name == "tokens":
                assert values.max() < self._vocab_size, "a token id is outside the tokenizer's vocabulary"
            self._writers[name].append(values)
            waiting.clear()
        self._num_waiting = 0

    def _values(self, what: str, name: str, values: ArrayLike, length: int | None = None) -> NDArray[Any]:
        """(length,) or (length, width): values of the array ``name``, one per token; of a document the only one."""
        layout = self._writers[DOCUMENTS_PREFIX + name if length is None else token_array(name)].layout
        found = np.asarray(values)
        shape = (() if length is None else (length,)) + (() if layout.width is None else (layout.width,))
        if found.shape != shape or not np.can_cast(found.dtype, layout.number_dtype, casting="same_kind"):
            shown = repr(values) if length is None else f"{found.dtype} of shape {found.shape}"
            raise ValueError(f"{what}: {name} = {shown}: must be {layout.dtype} of shape {shape}")
        return found.astype(layout.number_dtype).reshape(length or 1, *shape[length is not None :])


def _checked_mask(loss_mask: ArrayLike | None, length: int) -> NDArray[np.uint8]:
    if loss_mask is None:
        return np.ones(length, dtype=np.uint8)
    mask = np.asarray(loss_mask)
    if mask.shape != (length,) or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"loss_mask of shape {mask.shape}: must be {length} values of 0 and 1, one per token")
    return mask.astype(np.uint8)


class StoreWriter:
    """Writes a store under a temporary name beside ``path``; ``finish`` makes it visible by one rename.

    Use it as a context manager. Leaving it without ``finish`` removes the written files. A full disk raises a
    ``UserError`` that names ``path``, and leaves no files.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        *,
        shard_tokens: int = SHARD_TOKENS,
        chunk_tokens: int = CHUNK_TOKENS,
        classes: Mapping[str, Sequence[str]] | None = None,
        image_shape: tuple[int, int, int] | None = None,
    ) -> None:
        """``classes``: names of the classes whose numbers an array of documents holds, by array. ``image_shape``:
        (height, width, channels) where documents are images; their pixels are the array ``image``.
        """
        self.path, self._classes, self._image_shape = path, classes, image_shape
        self._tokenizer = tokenizer
        self._layout = (shard_tokens, chunk_tokens)
        self._temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
        self._sources: dict[str, SourceWriter] = {}

    def __enter__(self) -> Self:
        require_absent(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir()
        except OSError as error:
            raise UserError(f"{self.path}: cannot create {error.filename} ({error.strerror})") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for source in self._sources.values():
            source.abandon()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
            raise UserError(
                f"{self.path}: cannot write the store ({error.strerror}), the partial store is removed; "
                f"{remedy_of_limit(error)}"
            ) from error

    def source(
        self,
        name: str,
        split: Split = "train",
        *,
        has_loss_mask: bool = False,
        pairs: bool = False,
        tokens: Mapping[str, DTypeLike] | None = None,
        documents: Mapping[str, DTypeLike] | None = None,
    ) -> SourceWriter:
        """A new source. One that gets no document does not appear in the store.

        ``has_loss_mask``: whether its documents have a mask of the tokens that count as labels. ``pairs``: whether two
        documents at a time, one appended after the other, belong together and have the same values. ``tokens``, and
        ``documents``: arrays with a value for each token, or document, by name: ``{"label": "int32", "target":
        ("float32", (3,))}``. Raises ``ValueError`` for a type that a store cannot hold.
        """
        check_source_name(name)
        if name in self._sources:
            raise UserError(f"source name {name!r}: the name is in use; use another name")
        self._sources[name] = SourceWriter(
            self._temporary / name,
            self._tokenizer,
            split,
            self._layout,
            has_loss_mask=has_loss_mask,
            pairs=pairs,
            tokens=tokens or {},
            documents=documents or {},
        )
        return self._sources[name]

    def finish(self, report: dict[str, Any]) -> None:
        """Complete everything, bring it to the disk, name it. ``report`` becomes ``report.json``."""
        written = {name: source for name, source in self._sources.items() if source.num_documents}
        if not written:
            raise UserError(f"{self.path}: no document to write: the corpus is empty")
        for source in written.values():
            source.finish()
        write_root(
            self._temporary,
            self._tokenizer,
            sorted(written),
            report,
            classes=self._classes,
            image_shape=self._image_shape,
        )
        publish(self._temporary, self.path)


class TokenSource:
    """One source of an open store."""

    def __init__(
        self, directory: Path, name: str, *, is_checked: bool = False, files: InputFiles | None = None
    ) -> None:
        """Opens and checks the arrays.

        ``is_checked``: every block that is read is compared with its hash. ``files``: the names that its documents'
        origins lead to.
        """
        self.name, self.directory = name, directory
        self.image_shape: tuple[int, int, int] | None = None
        """Of the images that its documents are; its store sets it."""
        group = ArrayGroup(directory, is_checked=is_checked)
        self.split = group.text("split")
        if self.split not in SPLITS:
            raise UserError(f"{group.metadata_path}: split = {self.split!r}: must be {' or '.join(SPLITS)}")
        self.num_documents, self.num_tokens, self.num_bytes = map(group.count, ("documents", "tokens", "bytes"))
        self.content_hash = group.text("content_hash")
        _check_content_hash(group, self.content_hash)
        self.is_checked = is_checked
        self.chat: dict[str, Any] | None = group.attributes.get("chat")
        """Of conversations: template, special tokens, variables and rule of the loss mask; None: texts."""
        if not isinstance(self.chat, dict | None):
            raise UserError(f"{group.metadata_path}: damaged attributes (chat: must be a table)")
        self.has_text_pairs: bool = group.attributes.get("pairs", False)
        """Whether two texts at a time belong together, and have one label."""
        if not isinstance(self.has_text_pairs, bool) or (self.has_text_pairs and self.num_documents % 2):
            raise UserError(f"{group.metadata_path}: damaged attributes (pairs: must be true, of an even number)")
        self.reference: dict[str, Any] | None = group.attributes.get("reference")
        """The model and the layout that the array ``REFERENCE`` was computed with; None: there is no such array."""
        if not isinstance(self.reference, dict | None) or (self.reference is None) != (
            TOKENS_PREFIX + REFERENCE not in group.arrays
        ):
            raise UserError(f"{group.metadata_path}: damaged attributes (reference: must be a table beside its array)")
        self._tokens = group.open("tokens", self.num_tokens)
        self._doc_ends = group.open("doc_ends", self.num_documents)
        self._per_token = {
            array.removeprefix(TOKENS_PREFIX): group.open(array, self.num_tokens)
            for array in sorted(group.arrays)
            if array == LOSS_MASK or array.startswith(TOKENS_PREFIX)
        }
        self._documents = {
            array.removeprefix(DOCUMENTS_PREFIX): group.open(array, self.num_documents)
            for array in sorted(group.arrays)
            if array.startswith(DOCUMENTS_PREFIX)
        }
        self._origins = Origins(group, self.num_documents, files) if files and ORIGINS in group.arrays else None
        # Cheap, and it finds arrays of two different preparations in one directory.
        last_end = int(self._doc_ends.read(self.num_documents - 1, self.num_documents)[0])
        if last_end != self.num_tokens:
            at_fault = self._doc_ends.directory
            raise UserError(f"{at_fault}: the last document ends at {last_end} of {self.num_tokens} tokens")

    def check_sizes(self) -> None:
        """Raises ``UserError`` for a missing shard of the training data, or one of another size; opens none."""
        for array in (self._tokens, self._doc_ends, *self._per_token.values(), *self._documents.values()):
            array.check_sizes()

    @property
    def has_loss_mask(self) -> bool:
        """Whether not every token counts as a label."""
        return LOSS_MASK in self._per_token

    @property
    def has_preferences(self) -> bool:
        """Whether documents are preferences: the chosen answer to a prompt, then the rejected one."""
        return bool(self.chat and self.chat.get("pairs"))

    @property
    def holds_pairs(self) -> bool:
        """Whether two documents at a time stay in one sequence: preferences, and pairs of texts with one label."""
        return self.has_preferences or self.has_text_pairs

    def pair_fault(self, pair_tokens: int, sequence_length: int) -> str | None:
        """Why a pair of ``pair_tokens`` tokens fits no sequence, with the remedy; None: it fits."""
        if pair_tokens <= sequence_length:
            return None
        what, key = ("answers", "chat.max_tokens") if self.has_preferences else ("documents", "max_tokens")
        return (
            f"a pair of {what} has {pair_tokens:,} tokens, and a sequence {sequence_length:,}; use longer sequences "
            f"(data.sequence_length, data.curriculum), or prepare the source with a smaller {key}"
        )

    def longest_document(self) -> tuple[int, int]:
        """Number and tokens of the longest document, the first of several; reads the ends of all."""
        lengths = np.diff(self.document_ends(0, self.num_documents), prepend=0)
        number = int(lengths.argmax())
        return number, int(lengths[number])

    def longest_pair(self) -> int:
        """Most tokens of a pair; reads the ends of all documents."""
        return int(np.diff(self.document_ends(0, self.num_documents)[1::2], prepend=0).max(initial=0))

    @property
    def has_origins(self) -> bool:
        """Whether it records the origins of its documents."""
        return self._origins is not None

    @property
    def token_arrays(self) -> dict[str, np.dtype[Any]]:
        """Values for each token, the loss mask among them: name to type; rows are (base, (width,))."""
        return {name: array.layout.numpy_dtype for name, array in self._per_token.items()}

    @property
    def has_latents(self) -> bool:
        """Whether its images are latents, floats, and not bytes of pixels."""
        return IMAGE in self._documents and self.document_arrays[IMAGE].base.kind == "f"

    @property
    def document_arrays(self) -> dict[str, np.dtype[Any]]:
        """Values of tasks for each document: name to type; rows are (base, (width,))."""
        return {name: array.layout.numpy_dtype for name, array in self._documents.items()}

    def loss_mask(self, start: int, stop: int) -> NDArray[np.uint8]:
        """(stop - start,) 1 where the tokens from ``start`` on count as labels; all do where there is no mask."""
        return self._per_token[LOSS_MASK].read(start, stop) if self.has_loss_mask else np.ones(stop - start, np.uint8)

    def token_values(self, array: str, start: int, stop: int) -> NDArray[Any]:
        """(stop - start,) or (stop - start, width): the values of ``array`` for the tokens from ``start`` on.

        ``UserError`` with the arrays there are.
        """
        return self._array("token", self._per_token, array).read(start, stop)

    def document_values(self, array: str, first: int, last: int) -> NDArray[Any]:
        """(last - first,) or (last - first, width): of the documents ``first`` … ``last`` - 1 the values of ``array``.

        ``UserError`` with the arrays there are.
        """
        return self._array("document", self._documents, array).read(first, last)

    def _array(self, kind: str, arrays: Mapping[str, ShardedArray], name: str) -> ShardedArray:
        if name not in arrays:
            raise UserError(f"source {self.name}: no {kind} array {name!r}; it has {', '.join(arrays) or 'none'}")
        return arrays[name]

    def origin(self, document: int) -> Origin | None:
        """Origin of a document; None: the store has no origins."""
        return None if self._origins is None else self._origins.of(document)

    def read(self, start: int, stop: int) -> NDArray[np.uint32]:
        """(stop - start,) tokens from ``start`` on."""
        return self._tokens.read(start, stop)

    def read_into(self, start: int, out: NDArray[np.int32]) -> None:
        """The tokens from ``start`` on into (n,) ``out``; ids are far below 2^31."""
        self._tokens.read_into(start, out)

    def document(self, index: int) -> tuple[int, int]:
        """(start, stop) of document ``index`` in the tokens; its end-of-text token comes first."""
        ends = self._doc_ends.read(max(index - 1, 0), index + 1)
        return (int(ends[0]) if index else 0), int(ends[-1])

    def document_ends(self, first: int, last: int) -> NDArray[np.int64]:
        """(last - first,) where the documents ``first`` … ``last`` - 1 end in the tokens."""
        return self._doc_ends.read(first, last).astype(np.int64)

    def document_starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """(m,) ascending: the starts of all documents with tokens in ``start`` … ``stop`` - 1.

        The first is the document that holds ``start``, so it starts there or before.
        """
        return self._doc_ends.between(start, stop - 1).astype(np.int64)

    def document_starts_each(
        self, starts: NDArray[np.int64], num_tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``document_starts`` of the ``num_tokens`` from each of (k,) ``starts`` on: (m,) one after another, and their
        numbers (k,).
        """
        found, counts = self._doc_ends.between_each(starts, starts + (num_tokens - 1))
        return found.astype(np.int64), counts

    def document_at(self, token: int) -> int:
        """The index of the document that holds ``token``; the number of documents for the end of the source."""
        return self._doc_ends.searchsorted(token)


def _check_content_hash(group: ArrayGroup, written: str) -> None:
    """``UserError`` unless the content hash is that of the hashes of the source's shards."""
    try:
        found = content_hash(group.arrays)
    except (KeyError, ValueError) as error:
        raise UserError(f"{group.metadata_path}: damaged attributes (shard_hashes: {error!r})") from error
    if found != written:
        raise UserError(
            f"{group.metadata_path}: content_hash {written} does not match its shard_hashes; the store is damaged"
        )


def _check_images(source: TokenSource, shape: tuple[int, int, int] | None) -> None:
    """``UserError`` unless the pixels of a source of images are as many as ``shape`` has."""
    if shape is None:
        return
    expected = [np.dtype((kind, (math.prod(shape),))) for kind in (np.uint8, np.float16, np.float32)]
    if source.document_arrays.get(IMAGE) not in expected or source.num_tokens != source.num_documents:
        raise UserError(
            f"{source.directory}: no images of {' x '.join(map(str, shape))} pixels and channels, one per document "
            f"(array {DOCUMENTS_PREFIX}{IMAGE}); the store is damaged"
        )


def _check_one_kind(sources: Sequence[TokenSource]) -> None:
    """``UserError`` where some have pixels and others latents."""
    pixels, latents = ([one.directory for one in sources if one.has_latents is kind] for kind in (False, True))
    if pixels and latents:
        raise UserError(f"{latents[0]} has latents, and {pixels[0]} has not; the store is damaged")


class TokenStore:
    """An open store. Opening reads metadata and every shard's size and index, no tokens."""

    tokenizer: TokenizerIdentity
    """The tokenizer that it was written with."""
    weights: dict[str, float] | None
    """Default share of every training source in the samples; none: by their tokens."""
    classes: dict[str, list[str]]
    """Names of the classes that arrays of documents hold the numbers of, by array."""
    image_shape: tuple[int, int, int] | None
    """(height, width, channels) of the images that its documents are; None: they are texts."""

    def __init__(self, path: Path) -> None:
        """``UserError`` names the file where something is missing, damaged or of another version."""
        self.path = path
        root = read_root(path)
        self.format_version, self.tokenizer, self.weights = root.format_version, root.tokenizer, root.weights
        self.classes, self.image_shape = root.classes, root.image_shape
        self.is_checked = root.is_checked
        """Whether every block is compared with its hash when it is read."""
        files = InputFiles(path) if root.is_checked and (path / INPUT_FILES_DIR).is_dir() else None
        self.sources = {
            name: TokenSource(path / name, name, is_checked=root.is_checked, files=files) for name in root.sources
        }
        for source in self.sources.values():
            source.image_shape = self.image_shape
            _check_images(source, self.image_shape)
        _check_one_kind(list(self.sources.values()))
        self.title = str(path)
        """Its name in messages."""
        self.parts: tuple[TokenStore, ...] = (self,)
        """The stores on disk that it is made of."""

    @property
    def has_latents(self) -> bool:
        """Whether its images are latents, floats, and not bytes of pixels."""
        # Of several stores, which have the same kind, that of the first.
        return any(source.has_latents for source in self.parts[0].sources.values())

    def training_weights(self) -> dict[str, float]:
        """Of the training sources, by their names in this store: as the corpus file gave them, else by their tokens.

        ``UserError`` where all sources hold validation data.
        """
        training = {name: source for name, source in self.sources.items() if source.split == "train"}
        if not training:
            raise UserError(f"{self.title}: all its sources ({', '.join(self.sources)}) hold validation data")
        given = self.weights or {}
        return {name: given.get(name, float(source.num_tokens)) for name, source in training.items()}

    def check_sizes(self) -> None:
        """``TokenSource.check_sizes`` of every source."""
        for source in self.sources.values():
            source.check_sizes()

    def source(self, name: str) -> TokenSource:
        """The source called ``name``; ``UserError`` with the names there are."""
        if name not in self.sources:
            raise UserError(f"{self.title}: no source {name!r}; use one of {', '.join(self.sources)}")
        return self.sources[name]

    def class_name(self, array: str, number: int) -> str:
        """Name of class ``number`` of an array of documents; the number if the class has no name."""
        names = self.classes.get(array, [])
        return names[number] if 0 <= number < len(names) else str(number)

    def label(self, source: str, document: int) -> str | None:
        """The class of a document, by name; None where the source has none, or several numbers for each."""
        opened = self.source(source)
        dtype = opened.document_arrays.get(LABEL)
        if dtype is None or dtype.subdtype is not None or dtype.kind not in "iu":
            return None
        return self.class_name(LABEL, int(opened.document_values(LABEL, document, document + 1)[0]))

    def fingerprint(self) -> str:
        """sha256 over the tokenizer, and every source's split, counts and content hash: the same in every format."""
        identity = {
            "format_version": _FINGERPRINT_VERSION,
            "tokenizer": asdict(self.tokenizer),
            "sources": {name: source_identity(source) for name, source in self.sources.items()},
            # Of images the bytes alone do not tell rows from columns.
            **({"image_shape": self.image_shape} if self.image_shape else {}),
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def report(self) -> dict[str, Any]:
        """The counts of the preparation: the content of ``report.json``."""
        return read_json(self.path / REPORT_FILE)


def source_identity(source: TokenSource) -> dict[str, Any]:
    """Values that identify a source, as plain values."""
    return {
        "split": source.split,
        "documents": source.num_documents,
        "tokens": source.num_tokens,
        "bytes": source.num_bytes,
        "content_hash": source.content_hash,
        **({"pairs": True} if source.has_text_pairs else {}),
    }
