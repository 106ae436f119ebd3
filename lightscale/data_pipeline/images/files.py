"""Images and their classes out of files: folders, webdataset tars, parquet, npz, CIFAR-10's binary version.

    PATH/CLASS/…/NAME.png    a folder for each class, below a directory
    NAME.tar                 webdataset: KEY.jpg beside KEY.cls, or KEY.json with the label field
    NAME.parquet             rows with a column of images (bytes, or datasets' {bytes, path}) and a column of labels
    NAME.npz                 arrays images, uint8 (n, h, w) or (n, h, w, c), and labels, (n,)
    NAME.bin                 CIFAR-10's records: a byte of the class, then 32 x 32 bytes of red, of green and of blue

Directories may hold files of every kind, at any depth. Files come in the order of their names.
"""

import json
import re
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation.labels import class_of
from lightscale.data_pipeline.preparation.readers.inputs import MISSING
from lightscale.data_pipeline.preparation.readers.interface import one_line
from lightscale.data_pipeline.preparation.readers.table import IMAGE_SUFFIXES
from lightscale.errors import UserError

SUFFIXES = frozenset(IMAGE_SUFFIXES)
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, eq=False, kw_only=True)
class FoundImage:
    """An image in a file, not decoded."""

    id: str
    """The file, and the place in it."""
    data: bytes | NDArray[Any]
    label: str
    """Name of its class."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Names of columns, and of keys of JSON."""

    image: str = "image"
    label: str = "label"

    def class_name(self, value: Any, where: str) -> str:
        """The class that ``value`` is; ``UserError`` that begins with ``where`` for a value that is none."""
        plain = value.item() if isinstance(value, np.generic) else value
        return class_of(plain, where, field=self.label, classes=None)


class ImageFiles(ABC):
    """Files of one kind below a path."""

    def __init__(self, root: Path, paths: Sequence[Path], fields: Fields) -> None:
        """``root``: the path that the user gave; ``paths``: of the files."""
        self.root, self.paths, self.fields = root, paths, fields

    @staticmethod
    def is_usual(path: Path) -> bool:
        """Whether a file below a directory is taken; one that the user names is in any case."""
        return True

    @abstractmethod
    def labels(self) -> Iterator[str]:
        """Names of classes of all images; decodes none."""

    @abstractmethod
    def images(self) -> Iterator[FoundImage]:
        """All images, in the same order on every machine."""


class Folders(ImageFiles):
    """A class is the folder directly below the path."""

    def labels(self) -> Iterator[str]:
        """See ``ImageFiles``."""
        return map(self._label, self.paths)

    def images(self) -> Iterator[FoundImage]:
        """See ``ImageFiles``."""
        for path in self.paths:
            yield FoundImage(id=str(path), data=_content(path), label=self._label(path))

    def _label(self, path: Path) -> str:
        folder, *rest = path.relative_to(self.root).parts if path != self.root else (path.name,)
        if not rest:
            raise UserError(
                f"{path}: the image has no folder of its class; give its directory's parent, as in PATH/CLASS/NAME.png"
            )
        return self.fields.class_name(folder, str(path))


class Tars(ImageFiles):
    """webdataset: members with one key, up to the first dot of the name, are one sample."""

    suffixes: ClassVar[Collection[str]] = SUFFIXES
    """Of the members that are images."""

    def labels(self) -> Iterator[str]:
        """See ``ImageFiles``."""
        return (label for path in self.paths for _, _, label in self._samples(path, with_images=False))

    def images(self) -> Iterator[FoundImage]:
        """See ``ImageFiles``."""
        for path in self.paths:
            for name, data, label in self._samples(path, with_images=True):
                yield FoundImage(id=f"{path}:{name}", data=data, label=label)

    def _samples(self, path: Path, *, with_images: bool) -> Iterator[tuple[str, bytes, str]]:
        """(name of the image, its content, class) of each sample."""
        key, sample = "", dict[str, tuple[str, bytes]]()
        try:
            with tarfile.open(path) as tar:
                for member in tar:
                    if not member.isfile():
                        continue
                    folder, _, name = member.name.rpartition("/")
                    stem, _, extension = name.partition(".")
                    if f"{folder}/{stem}" != key:
                        yield from self._sample(path, sample)
                        key, sample = f"{folder}/{stem}", {}
                    kind = f".{extension.lower()}"
                    content = b""
                    if with_images or kind not in self.suffixes:
                        file = tar.extractfile(member)
                        content = b"" if file is None else file.read()
                    sample["image" if kind in self.suffixes else kind] = member.name, content
                yield from self._sample(path, sample)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise UserError(f"{path}: cannot be read as a tar file ({one_line(error)}); write it again") from error

    def _sample(self, path: Path, sample: dict[str, tuple[str, bytes]]) -> Iterator[tuple[str, bytes, str]]:
        if "image" not in sample:
            return
        name, content = sample["image"]
        where = f"{path}:{name}"
        try:
            if ".cls" in sample:
                value: Any = sample[".cls"][1].decode().strip()
            elif ".json" in sample:
                found = json.loads(sample[".json"][1])
                value = found.get(self.fields.label, MISSING) if isinstance(found, dict) else MISSING
            else:
                value = MISSING
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: the label cannot be read ({one_line(error)}); correct it") from error
        yield name, content, self.fields.class_name(value, where)


class Parquets(ImageFiles):
    """Rows, as datasets of the Hugging Face hub have them."""

    def labels(self) -> Iterator[str]:
        """See ``ImageFiles``."""
        for path in self.paths:
            for where, row in self._rows(path, [self.fields.label]):
                yield self.fields.class_name(row[self.fields.label], where)

    def images(self) -> Iterator[FoundImage]:
        """See ``ImageFiles``."""
        image, label = self.fields.image, self.fields.label
        for path in self.paths:
            for where, row in self._rows(path, [image, label]):
                data = row[image]
                if isinstance(data, dict):
                    data = data.get("bytes")
                # A row without bytes is a broken image, as an empty file is.
                content = data if isinstance(data, bytes) else b""
                yield FoundImage(id=where, data=content, label=self.fields.class_name(row[label], where))

    def _rows(self, path: Path, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        parquet, arrow = _pyarrow(path)
        try:
            with parquet.ParquetFile(path) as file:
                known = file.schema_arrow.names
                if missing := [name for name in columns if name not in known]:
                    option = "image-field" if missing[0] == self.fields.image else "label-field"
                    raise UserError(
                        f"{path}: no column {missing[0]!r}; it has {', '.join(known)}; set another with --{option}"
                    )
                number = 0
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
                    for row in batch.to_pylist():
                        yield f"{path}:{number}", row
                        number += 1
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read as parquet ({one_line(error)}); write it again") from error


class Arrays(ImageFiles):
    """numpy's archives; pickled objects in them are refused."""

    array: ClassVar[str] = "images"
    """Name of the array of images, beside ``labels``."""

    def labels(self) -> Iterator[str]:
        """See ``ImageFiles``."""
        for path in self.paths:
            (labels,) = self._read(path, "labels")
            yield from self._names(path, labels)

    def images(self) -> Iterator[FoundImage]:
        """See ``ImageFiles``."""
        for path in self.paths:
            images, labels = self._read(path, self.array, "labels")
            self.check(str(path), images)
            if len(labels) != len(images):
                raise UserError(f"{path}: {len(images)} {self.array} and {len(labels)} labels; use one label per image")
            for number, (image, label) in enumerate(zip(images, self._names(path, labels), strict=True)):
                yield FoundImage(id=f"{path}:{number}", data=image, label=label)

    def check(self, where: str, found: NDArray[Any]) -> None:
        """Raise UserError that begins with ``where`` unless ``found`` are images."""
        if found.dtype != np.uint8 or found.ndim not in (3, 4):
            raise UserError(
                f"{where}: images is {found.dtype} of shape {found.shape}; use uint8, 0 to 255, of shape "
                "(n, height, width) or (n, height, width, channels)"
            )

    def _names(self, path: Path, labels: NDArray[Any]) -> Iterator[str]:
        for number, label in enumerate(labels):
            yield self.fields.class_name(label, f"{path}:{number}")

    def _read(self, path: Path, *names: str) -> list[NDArray[Any]]:
        try:
            with np.load(path, allow_pickle=False) as archive:
                if missing := [name for name in names if name not in archive]:
                    raise UserError(
                        f"{path}: no array {missing[0]!r}; it has {', '.join(archive) or 'none'}; write it with "
                        f"numpy.savez(path, {self.array}=…, labels=…)"
                    )
                arrays = [archive[name] for name in names]
        except UserError:
            raise
        # zipfile raises RuntimeError for what it does not implement, and for files with a password.
        except (OSError, ValueError, EOFError, RuntimeError, MemoryError, zlib.error, zipfile.BadZipFile) as error:
            raise UserError(f"{path}: cannot be read as npz ({one_line(error)}); write it again") from error
        for name, array in zip(names, arrays, strict=True):
            # Of a member that is no .npy, NumPy returns the bytes.
            if not isinstance(array, np.ndarray):
                raise UserError(f"{path}: {name} is no NumPy array; write the file again")
            if name == "labels" and array.ndim != 1:
                raise UserError(f"{path}: labels has the shape {array.shape}; use one label per image, (n,)")
        return arrays


class CIFARBinaries(ImageFiles):
    """The binary version of CIFAR-10; ``batches.meta.txt`` beside a file, one class on a line, has the names."""

    _SIDE, _CLASSES = 32, 10

    @staticmethod
    def is_usual(path: Path) -> bool:
        """See ``ImageFiles``: many programs name their files .bin."""
        return re.fullmatch(r"data_batch_\d+|test_batch", path.stem) is not None

    def labels(self) -> Iterator[str]:
        """See ``ImageFiles``."""
        for path in self.paths:
            names = self._names(path)
            yield from (names[number] for number in self._records(path)[:, 0])

    def images(self) -> Iterator[FoundImage]:
        """See ``ImageFiles``."""
        for path in self.paths:
            names = self._names(path)
            for number, record in enumerate(self._records(path)):
                planes = record[1:].reshape(3, self._SIDE, self._SIDE)
                yield FoundImage(id=f"{path}:{number}", data=planes.transpose(1, 2, 0), label=names[record[0]])

    def _records(self, path: Path) -> NDArray[np.uint8]:
        content = _content(path)
        size = 1 + 3 * self._SIDE**2
        if not content or len(content) % size:
            raise UserError(
                f"{path}: {len(content):,} bytes are no records of {size:,}, as the binary version of CIFAR-10 has; "
                "give its data_batch_*.bin and test_batch.bin"
            )
        records = np.frombuffer(content, dtype=np.uint8).reshape(-1, size)
        if (largest := int(records[:, 0].max())) >= self._CLASSES:
            raise UserError(
                f"{path}: a record has the class {largest}, and CIFAR-10 has 0 to {self._CLASSES - 1}; give its "
                "data_batch_*.bin and test_batch.bin"
            )
        return records

    def _names(self, path: Path) -> list[str]:
        found = path.with_name("batches.meta.txt")
        if not found.is_file():
            return [str(number) for number in range(self._CLASSES)]
        names = _content(found).decode(errors="replace").split()
        if len(set(names)) != self._CLASSES or len(names) != self._CLASSES:
            raise UserError(f"{found}: {len(set(names))} different names of classes; CIFAR-10 has {self._CLASSES}")
        return [self.fields.class_name(name, str(found)) for name in names]


KINDS: Mapping[str, type[ImageFiles]] = {
    **dict.fromkeys(SUFFIXES, Folders),
    ".tar": Tars,
    ".parquet": Parquets,
    ".npz": Arrays,
    ".bin": CIFARBinaries,
}


def find_files(
    paths: Sequence[Path],
    fields: Fields,
    known: Mapping[str, type[ImageFiles]] = KINDS,
    *,
    without: Collection[Path] = (),
) -> list[ImageFiles]:
    """The files of images at and below ``paths``, of the ``known`` kinds; ``UserError`` for a path without any.

    Files of ``without`` are skipped: those that are held out.
    """
    found: list[ImageFiles] = []
    held = {path.resolve() for path in without}
    for root in paths:
        if not root.exists():
            raise UserError(f"{root}: no such file or directory; give files or directories of images")
        files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
        kinds: dict[type[ImageFiles], list[Path]] = {}
        for path in files:
            kind = known.get(path.suffix.lower())
            if kind is not None and (path == root or kind.is_usual(path)) and path.resolve() not in held:
                kinds.setdefault(kind, []).append(path)
        if not kinds:
            beside = " beside those of --validation-images" if held else ""
            raise UserError(f"{root}: no files of images{beside}; known suffixes: {', '.join(sorted(known))}")
        found += [kind(root, of_kind, fields) for kind, of_kind in kinds.items()]
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make it readable, or remove it") from error


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow  # noqa: PLC0415 - optional: folders need none of it
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        raise UserError(f"{path}: parquet needs the package pyarrow; pip install 'lightscale[images]'") from None
    return pyarrow.parquet, pyarrow
