"""Images out of folders, webdataset tars, parquet and npz, by the command; broken and unfit ones are named."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightscale.cli import main
from lightscale.data_pipeline.store.several_stores import SeveralStores
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers.symbols import shade_tokenizer
from lightscale.errors import UserError

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")
pyarrow = pytest.importorskip("pyarrow", reason="parquet is read by pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

# It imports Pillow.
from lightscale.data_pipeline.images.broken import Broken  # noqa: E402
from lightscale.data_pipeline.images.decode import ImageForm, decoded  # noqa: E402

SHAPE = (6, 8, 3)
WORDS = ["--images", "6x8x3"]
LABELS = ["cat", "dog", "cat", "owl", "dog"]


def pixels(shape: tuple[int, ...] = SHAPE, count: int = len(LABELS)) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, (count, *shape), dtype=np.uint8)


def png(array: NDArray[np.uint8]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return stream.getvalue()


def write_folder(root: Path) -> None:
    for number, (label, array) in enumerate(zip(LABELS, pixels(), strict=True)):
        path = root / label / "below" / f"{number}.PNG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(array))
    (root / "notes.txt").write_text("no image")


def write_tar(root: Path) -> None:
    root.mkdir()
    with tarfile.open(root / "shard-0.tar", "w") as tar:
        for number, (label, array) in enumerate(zip(LABELS, pixels(), strict=True)):
            # With both kinds of labels.
            beside = (".cls", label.encode()) if number % 2 else (".json", json.dumps({"label": label}).encode())
            for suffix, content in ((".png", png(array)), beside):
                member = tarfile.TarInfo(f"part/{number:04}{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_parquet(root: Path) -> None:
    root.mkdir()
    # As datasets writes them, and as plain bytes.
    rows = [{"bytes": png(array), "path": None} for array in pixels()]
    table = pyarrow.table({"image": rows[:3], "label": LABELS[:3]})
    parquet.write_table(table, root / "0.parquet")
    table = pyarrow.table({"image": [row["bytes"] for row in rows[3:]], "label": LABELS[3:]})
    parquet.write_table(table, root / "1.parquet")


def write_npz(root: Path) -> None:
    root.mkdir()
    np.savez(root / "all.npz", images=pixels(), labels=np.array(LABELS))


def write_cifar(root: Path) -> None:
    """CIFAR-10's records, with other classes than LABELS."""
    root.mkdir()
    images = pixels((32, 32, 3))
    for name, numbers in {"data_batch_1.bin": range(3), "data_batch_2.bin": range(3, 5)}.items():
        # A byte of the class, and the colours one after another.
        records = [bytes([9 - number]) + images[number].transpose(2, 0, 1).tobytes() for number in numbers]
        (root / name).write_bytes(b"".join(records))


WRITERS: dict[str, Callable[[Path], None]] = {
    "folder": write_folder,
    "tar": write_tar,
    "parquet": write_parquet,
    "npz": write_npz,
}


def prepare(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, Any]:
    assert main(["data", "prepare", *map(str, words), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def content(path: Path, source: str) -> list[tuple[str, bytes]]:
    """(class, pixels) of each image, sorted."""
    store = TokenStore(path)
    opened = store.source(source)
    images = opened.document_values("image", 0, opened.num_documents)
    labels = [store.label(source, number) or "" for number in range(opened.num_documents)]
    return sorted((label, image.tobytes()) for label, image in zip(labels, images, strict=True))


@pytest.mark.parametrize("kind", WRITERS)
def test_pixels_and_classes_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    WRITERS[kind](tmp_path / "photos")
    store = tmp_path / "store"
    report = prepare(capsys, tmp_path / "photos", *WORDS, "--validation", "0", "--out", store)
    assert report["sources"]["photos"]["classes"] == {"cat": 2, "dog": 2, "owl": 1}
    assert report["problems"] == {}
    expected = sorted((label, array.tobytes()) for label, array in zip(LABELS, pixels(), strict=True))
    assert content(store, "photos") == expected
    assert TokenStore(store).image_shape == SHAPE
    assert main(["data", "verify", str(store)]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", str(store)]) == 0
    shown = capsys.readouterr().out
    assert "images of 6 x 8 pixels, 3 channels: 5 read" in shown
    assert "label cat" in shown
    assert "document arrays: image (uint8 x 144), label (int32)" in shown


@pytest.mark.parametrize("names", ["", "zero one two three four five six seven eight nine\n"])
def test_records_of_cifar_are_images(tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str) -> None:
    write_cifar(tmp_path / "cifar")
    if names:
        (tmp_path / "cifar/batches.meta.txt").write_text(names.replace(" ", "\n"))
    words = [tmp_path / "cifar", "--images", "32x32x3", "--validation", "0", "--out", tmp_path / "store"]
    prepare(capsys, *words)
    expected = (names.split() or [*map(str, range(10))])[9:4:-1]
    found = [(label, array.tobytes()) for label, array in zip(expected, pixels((32, 32, 3)), strict=True)]
    assert content(tmp_path / "store", "cifar") == sorted(found)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.bin": b"\0" * 3074}, "a.bin: 3,074 bytes are no records of 3,073, as the binary version of CIFAR-10 has"),
        ({"a.bin": b""}, "a.bin: 0 bytes are no records"),
        ({"a.bin": b"\x0a" + b"\0" * 3072}, "a.bin: a record has the class 10, and CIFAR-10 has 0 to 9"),
        (
            {"a.bin": b"\0" * 3073, "batches.meta.txt": b"cat\ndog\n"},
            "batches.meta.txt: 2 different names of classes; CIFAR-10 has 10",
        ),
        (
            {"a.bin": b"\0" * 3073, "batches.meta.txt": b"cat\n" * 10},
            "batches.meta.txt: 1 different names of classes; CIFAR-10 has 10",
        ),
    ],
)
def test_wrong_records_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, bytes], message: str
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    words = ["data", "prepare", str(tmp_path / "a.bin"), "--images", "32x32x3", "--out", str(tmp_path / "store")]
    assert main(words) == 78
    assert message in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_pixels_are_tokens_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A document is the grey values of an image, row by row, behind the end-of-text token; with its class."""
    write_cifar(tmp_path / "cifar")
    words = [tmp_path / "cifar", "--images", "32x32x1", "--convert-modes", "--pixels", "--out", tmp_path / "store"]
    report = prepare(capsys, *words, "--validation-images", tmp_path / "cifar/data_batch_2.bin")
    store = TokenStore(tmp_path / "store")
    assert store.image_shape is None
    assert {name: one["documents"] for name, one in report["sources"].items()} == {"cifar": 3, "cifar-validation": 2}
    source = store.source("cifar")
    tokens = source.read(0, source.num_tokens).reshape(3, 1 + 32 * 32)
    assert (tokens[:, 0] == store.tokenizer.eot_id).all()
    grey = [np.asarray(Image.fromarray(one).convert("L")).ravel() for one in pixels((32, 32, 3))[:3]]
    assert np.array_equal(tokens[:, 1:], np.stack(grey).astype(np.int64) + 256)
    assert [store.label("cifar", number) for number in range(3)] == ["9", "8", "7"]
    # Of generated images the same shades have the same ids.
    assert store.tokenizer.sha256 == shade_tokenizer("pathfinder").sha256
    assert main(["data", "verify", str(tmp_path / "store")]) == 0
    assert main(["data", "inspect", str(tmp_path / "store"), "--sample", "1"]) == 0
    shown = capsys.readouterr().out
    assert "images of 32 x 32 pixels, 1 channel" in shown and "tokenizer pixels: 513 ids" in shown


def test_the_store_does_not_depend_on_threads_or_on_other_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = pixels((4, 4), 400)
    np.savez(tmp_path / "all.npz", images=images, labels=np.arange(400) % 10)
    np.savez(tmp_path / "half.npz", images=images[::2], labels=np.arange(0, 400, 2) % 10)
    of = {}
    for name, words in {"one": ["all.npz"], "two": ["all.npz", "--workers", 2], "half": ["half.npz"]}.items():
        out = tmp_path / name
        words = [tmp_path / words[0], *words[1:], "--images", "4x4x1", "--validation", "0.25", "--name", "a"]
        report = prepare(capsys, *words, "--out", out)
        of[name] = {split: {bytes(one) for _, one in content(out, split)} for split in ("a", "a-validation")}
        # Numbers stay in their order.
        assert next(iter(report["sources"]["a"]["classes"])) == "0"
    assert TokenStore(tmp_path / "one").fingerprint() == TokenStore(tmp_path / "two").fingerprint()
    assert 60 < len(of["one"]["a-validation"]) < 140
    assert of["half"]["a-validation"] == of["one"]["a-validation"] - {one.tobytes() for one in images[1::2]}


def test_validation_images_have_their_own_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "train")
    write_npz(tmp_path / "held")
    words = [tmp_path / "train", "--validation-images", tmp_path / "held", *WORDS, "--name", "pets"]
    report = prepare(capsys, *words, "--out", tmp_path / "store")
    assert {name: one["documents"] for name, one in report["sources"].items()} == {"pets": 5, "pets-validation": 5}
    assert content(tmp_path / "store", "pets") == content(tmp_path / "store", "pets-validation")


def test_validation_images_are_no_training_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever they lie, and by whichever link they are named; of a directory with nothing else nothing remains."""
    write_folder(tmp_path / "photos")
    (tmp_path / "link").symlink_to(tmp_path / "photos/cat")
    words = [tmp_path / "photos", *WORDS, "--name", "pets", "--validation-images"]
    # The folder of a class is not its name below itself.
    named = [tmp_path / "photos/cat/below/0.PNG", "--validation-images", tmp_path / "link/below/2.PNG"]
    assert main(["data", "prepare", *map(str, [*words, *named, "--out", tmp_path / "store"])]) == 78
    assert "the image has no folder of its class" in capsys.readouterr().err
    held = tmp_path / "photos/held"
    held.mkdir()
    for name in ("cat", "owl"):
        (tmp_path / "photos" / name).rename(held / name)
    report = prepare(capsys, *words, held, "--out", tmp_path / "store")
    assert {name: one["documents"] for name, one in report["sources"].items()} == {"pets": 2, "pets-validation": 3}
    same = [str(held), *WORDS, "--validation-images", str(tmp_path / "photos"), "--out", str(tmp_path / "other")]
    assert main(["data", "prepare", *same]) == 78
    assert "held: no files of images beside those of --validation-images" in capsys.readouterr().err


def test_files_named_bin_are_taken_below_a_directory_only_by_the_names_of_cifar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cifar(tmp_path / "cifar")
    (tmp_path / "cifar/pytorch_model.bin").write_bytes(b"weights")
    words = ["--images", "32x32x3", "--validation", "0", "--out"]
    report = prepare(capsys, tmp_path / "cifar", *words, tmp_path / "store")
    assert report["sources"]["cifar"]["documents"] == 5
    named = ["data", "prepare", str(tmp_path / "cifar/pytorch_model.bin"), *words, str(tmp_path / "other")]
    assert main(named) == 78
    assert "pytorch_model.bin: 7 bytes are no records" in capsys.readouterr().err


def test_broken_images_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "photos")
    (tmp_path / "photos/cat/empty.png").touch()
    (tmp_path / "photos/dog/short.png").write_bytes(png(pixels()[0])[:60])
    (tmp_path / "photos/dog/text.jpg").write_text("no image")
    words = [str(tmp_path / "photos"), *WORDS, "--validation", "0", "--out", str(tmp_path / "store")]
    assert main(["data", "prepare", *words, "--strict"]) == 78
    assert f"broken image: {tmp_path / 'photos/cat/empty.png'}" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    problem = prepare(capsys, *words)["problems"]["broken image"]
    assert problem["count"] == 3
    named = [Path(example.split(": ")[0]).name for example in problem["examples"]]
    assert named == ["empty.png", "short.png", "text.jpg"]
    assert len(content(tmp_path / "store", "photos")) == 5


def test_every_cut_of_a_file_is_whole_or_broken() -> None:
    data = png(pixels()[0])
    form = ImageForm(shape=SHAPE)
    found = [decoded(data[:length], form, "x") for length in range(0, len(data), 7)]
    assert all(isinstance(one, Broken) or np.array_equal(one, pixels()[0]) for one in found)
    assert sum(isinstance(one, Broken) for one in found) > len(found) // 2


def test_other_sizes_and_modes_are_changed_on_request() -> None:
    grey = Image.fromarray(pixels((12, 12))[0])
    stream = io.BytesIO()
    grey.convert("P").save(stream, "GIF")
    for resize in ("crop", "stretch"):
        form = ImageForm(shape=SHAPE, resize=resize, convert=True)
        found = decoded(stream.getvalue(), form, "x")
        assert isinstance(found, np.ndarray)
        assert found.shape == SHAPE
        box = (0, 1.5, 12, 10.5) if resize == "crop" else None
        expected = np.asarray(grey.convert("RGB").resize((8, 6), Image.Resampling.BICUBIC, box=box))
        assert np.array_equal(found, expected)
    # Their values would be cut off at 255.
    for wide in (np.uint16, np.int32, np.float32):
        stream = io.BytesIO()
        Image.fromarray(np.full(SHAPE[:2], 300, dtype=wide)).save(stream, "TIFF")
        with pytest.raises(UserError, match="more than 8 bits per channel; scale its values to 8 bits"):
            decoded(stream.getvalue(), ImageForm(shape=SHAPE, convert=True), "x")
    # A photograph of a turned camera stands upright.
    turned, exif = Image.fromarray(pixels()[0]).transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    turned.save(stream, "PNG", exif=exif)
    assert np.array_equal(decoded(stream.getvalue(), ImageForm(shape=SHAPE), "x"), pixels()[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "0.PNG: the image has 6 x 8 pixels, and --images 8x6x3 needs 8 x 6; use --resize crop or --resize"),
        (["--images", "6x8x1"], "the image has mode RGB, and --images 6x8x1 needs L; use --convert-modes"),
        (["--images", "6x8x2"], "--images: 2 channels; use 1 (grey) or 3 (RGB)"),
        (["--images", "6x8"], "--images 6x8: must be HEIGHTxWIDTHxCHANNELS"),
        (["--images", "999x999x3"], "--images: 2,994,003 bytes per image; use at most 1,048,576"),
        (["--tokenizer", "ascii"], "--images and --tokenizer: the latter is for texts; remove it"),
        (["--validation", "1"], "--validation 1.0: must be at least 0 and below 1"),
        (
            ["--pixels"],
            "--pixels: a token is a grey value, and --images 8x6x3 has 3 channels; use 8x6x1, with --convert",
        ),
        (["--workers", "0"], "--workers 0: use at least 1"),
    ],
)
def test_wrong_requests_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    write_folder(tmp_path / "photos")
    request = ["data", "prepare", str(tmp_path / "photos"), "--images", "8x6x3", *words]
    assert main([*request, "--out", str(tmp_path / "store")]) != 0
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": [0, 1]}, "no array 'images'; it has labels; write it with numpy.savez"),
        ({"images": np.zeros((2, 6, 8, 3)), "labels": [0, 1]}, "images is float64 of shape (2, 6, 8, 3); use uint8"),
        ({"images": pixels(), "labels": [0, 1]}, "5 images and 2 labels; use one label per image"),
        ({"images": pixels(), "labels": np.zeros((5, 2))}, "labels has the shape (5, 2); use one label per image"),
        ({"images": pixels(), "labels": np.zeros(5)}, "the class is 0.0; it must be a whole number"),
        ({"images": np.array([{}]), "labels": [0]}, "cannot be read as npz"),
    ],
)
def test_wrong_arrays_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arrays: dict[str, Any], message: str
) -> None:
    path = tmp_path / "all.npz"
    np.savez(path, **arrays)
    assert main(["data", "prepare", str(path), *WORDS, "--out", str(tmp_path / "store")]) == 78
    found = capsys.readouterr().err
    assert str(path) in found
    assert message in found
    assert not (tmp_path / "store").exists()


def test_files_without_classes_or_images_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "store")]
    for name in ("alone", "nothing", "unlabelled", "column", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "alone/a.png").write_bytes(png(pixels()[0]))
    write_tar(tmp_path / "tars")
    with tarfile.open(tmp_path / "unlabelled/a.tar", "w") as tar:
        tar.add(tmp_path / "alone/a.png", "a.png")
    parquet.write_table(pyarrow.table({"img": [b""]}), tmp_path / "column/a.parquet")
    (tmp_path / "broken/a.tar").write_bytes((tmp_path / "tars/shard-0.tar").read_bytes()[:700])
    for name, message in {
        "alone": "a.png: the image has no folder of its class",
        "nothing": "nothing: no files of images; known suffixes: ",
        "missing": "missing: no such file or directory",
        "unlabelled": 'a.tar:a.png: label_field = "label": the document has no such field',
        "column": "a.parquet: no column 'label'; it has img; set another with --label-field",
        "broken": "a.tar: cannot be read as a tar file",
    }.items():
        assert main(["data", "prepare", str(tmp_path / name), *WORDS, *out]) == 78
        assert message in capsys.readouterr().err
    assert main(["data", "prepare", str(tmp_path / "tars"), "--resize", "crop", *out]) == 78
    assert "--resize: it belongs to images; add --images" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    prepare(capsys, tmp_path / "tars", *WORDS, "--validation", "0", *out)
    assert main(["data", "add", out[1], str(tmp_path / "tars"), "--out", str(tmp_path / "more")]) == 78
    assert "has images, and `data add` reads texts; prepare the new images with" in capsys.readouterr().err


def test_rows_are_not_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same bytes; and stores of other shapes, or of texts, are not mixed."""
    for name, shape in (("wide", (4, 8)), ("high", (8, 4))):
        np.savez(tmp_path / f"{name}.npz", images=pixels((4, 8)).reshape(-1, *shape), labels=range(5))
        words = ["--images", f"{shape[0]}x{shape[1]}x1", "--name", "a", "--validation", "0"]
        prepare(capsys, tmp_path / f"{name}.npz", *words, "--out", tmp_path / name)
    wide, high = TokenStore(tmp_path / "wide"), TokenStore(tmp_path / "high")
    assert wide.source("a").content_hash == high.source("a").content_hash
    assert wide.fingerprint() != high.fingerprint()
    with pytest.raises(UserError, match=r"has images of 8 x 4 x 1 .*, and data.stores.wide"):
        SeveralStores({"wide": tmp_path / "wide", "high": tmp_path / "high"})
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "wide", damaged)
    root = damaged / "zarr.json"
    for shape, message in (([4, 9, 1], "no images of 4 x 9 x 1"), ([4, 8], "image_shape"), ("4x8", "image_shape")):
        text = json.loads(root.read_text())
        text["attributes"]["image_shape"] = shape
        root.write_text(json.dumps(text))
        with pytest.raises(UserError, match=message):
            TokenStore(damaged)
