"""The keys of a store's documents: they detect duplicates of its documents in other files.

    STORE/document_keys/keys.json       by kind: the number of records and the XXH3-128 of every file
    STORE/document_keys/KIND/NNNNNN     the keys of an equal range of all possible ones each, ascending, each once

Exact: 16 bytes for every distinct text; near: 8 bytes for every distinct band, 14 per document. Keys of dropped
duplicates are included: a new document that resembles a dropped copy is a duplicate too. The document of a key is not
stored, because the earlier document always stays.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightscale.data_pipeline.store.format import KEYS_DIR
from lightscale.data_pipeline.store.shards import read_json
from lightscale.data_pipeline.whole_files import whole_file, write_json
from lightscale.errors import UserError

KEY_DTYPES: dict[str, np.dtype[Any]] = {
    "exact": np.dtype([("high", "<u8"), ("low", "<u8")]),
    "near": np.dtype([("high", "<u8")]),
}
KEY_SPACE = 2**64
_INDEX = "keys.json"


@dataclass(frozen=True, kw_only=True)
class KeysFile:
    """The record of a file of keys."""

    num_keys: int
    xxh3: str


def write_keys(path: Path, parts: Iterable[NDArray[np.void]]) -> KeysFile:
    """The file ``path`` of ascending keys, some in each of ``parts``, whole or not at all."""
    num_keys, digest = 0, xxhash.xxh3_128()
    with whole_file(path) as temporary, temporary.open("wb") as file:
        for keys in parts:
            num_keys += len(keys)
            digest.update(keys.data)
            file.write(keys.data)
    return KeysFile(num_keys=num_keys, xxh3=digest.hexdigest())


def write_index(store: Path, kinds: Mapping[str, Sequence[KeysFile]]) -> None:
    """Record the files of keys, by kind; the files exist already."""
    (store / KEYS_DIR).mkdir(exist_ok=True)
    content = {kind: [asdict(file) for file in files] for kind, files in kinds.items()}
    write_json(store / KEYS_DIR / _INDEX, content)


class DocumentKeys:
    """The keys that a store keeps."""

    def __init__(self, store: Path) -> None:
        """``UserError`` where it keeps none, or files of another size."""
        path = store / KEYS_DIR / _INDEX
        if not path.exists():
            raise UserError(
                f"{store}: it stores no keys of its documents (generated, or prepared with duplicates.keep_keys = "
                "false or by an earlier version), so their duplicates cannot be found; prepare it again with keys, or "
                "prepare the new files separately and train on both stores (data.stores)"
            )
        self._directory = store / KEYS_DIR
        try:
            self.files = {
                kind: [KeysFile(**one) for one in files]
                for kind, files in read_json(path).items()
                if KEY_DTYPES[kind] is not None
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged ({error!r}); prepare the store again") from error
        for kind, files in self.files.items():
            for number, file in enumerate(files):
                expected = file.num_keys * KEY_DTYPES[kind].itemsize
                found = self.path(kind, number).stat().st_size if self.path(kind, number).exists() else -1
                if found != expected:
                    what = "is missing" if found < 0 else f"has {found} bytes instead of {expected}"
                    raise UserError(f"{self.path(kind, number)}: it {what}; the store is damaged")

    def path(self, kind: str, number: int) -> Path:
        """Of file ``number`` of a kind."""
        return self._directory / kind / f"{number:06}"

    def num_keys(self, kind: str) -> int:
        """In all files of a kind."""
        return sum(file.num_keys for file in self.files.get(kind, []))

    def fault(self, kind: str, number: int) -> str | None:
        """The fault of the content of a file; None: no fault."""
        path, written = self.path(kind, number), self.files[kind][number].xxh3
        try:
            found = xxhash.xxh3_128_hexdigest(path.read_bytes())
        except OSError as error:
            return f"{path}: {error.strerror}; a key file is missing"
        return None if found == written else f"{path}: hash {found} instead of {written}; the file is damaged"

    def between(self, kind: str, start: int, stop: int) -> NDArray[np.void]:
        """The keys of a kind with ``start`` <= high half < ``stop``, ascending."""
        files = self.files.get(kind, [])
        found = [np.empty(0, dtype=KEY_DTYPES[kind])]
        first = start * len(files) // KEY_SPACE
        last = -(-stop * len(files) // KEY_SPACE)
        for number in range(first, last):
            if not files[number].num_keys:
                continue
            keys = np.memmap(self.path(kind, number), dtype=KEY_DTYPES[kind], mode="r")
            begin, end = (
                len(keys) if bound >= KEY_SPACE else int(np.searchsorted(keys["high"], np.uint64(bound)))
                for bound in (start, stop)
            )
            found.append(np.array(keys[begin:end]))
        return np.concatenate(found)
