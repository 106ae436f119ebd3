"""Latents out of folders, webdataset tars and npz, by the command: bit by bit, or refused by name."""

import io
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.data_pipeline.store.several_stores import SeveralStores
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.tasks.diffusion import Diffusion, DiffusionTaskConfig

SHAPE = (4, 6, 5)
WORDS = ["--latents", "4x6x5", "--validation", "0", "--name", "a"]
LABELS = ["cat", "dog", "cat", "owl", "dog"]


def latents(dtype: str = "float16") -> NDArray[Any]:
    """Far out of the range of pixels, channel by channel."""
    found = np.random.default_rng(1).normal(size=(len(LABELS), *SHAPE)) * np.arange(1, 6) * 7 + np.arange(5) - 3
    return found.astype(dtype)


def npy(array: NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def write_folder(root: Path, dtype: str) -> None:
    for number, (label, array) in enumerate(zip(LABELS, latents(dtype), strict=True)):
        path = root / label / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(npy(array))


def write_tar(root: Path, dtype: str) -> None:
    root.mkdir()
    with tarfile.open(root / "shard-0.tar", "w") as tar:
        for number, (label, array) in enumerate(zip(LABELS, latents(dtype), strict=True)):
            beside = (".cls", label.encode()) if number % 2 else (".json", json.dumps({"label": label}).encode())
            for suffix, content in ((".npy", npy(array)), beside):
                member = tarfile.TarInfo(f"{number:04}{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_npz(root: Path, dtype: str) -> None:
    root.mkdir()
    np.savez(root / "all.npz", latents=latents(dtype), labels=np.array(LABELS))


WRITERS: dict[str, Callable[[Path, str], None]] = {"folder": write_folder, "tar": write_tar, "npz": write_npz}


@pytest.mark.parametrize(("kind", "dtype"), [("folder", "float16"), ("tar", "float32"), ("npz", "float16")])
def test_numbers_and_classes_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, dtype: str
) -> None:
    WRITERS[kind](tmp_path / "files", dtype)
    words = ["data", "prepare", str(tmp_path / "files"), *WORDS, "--out", str(tmp_path / "store")]
    assert main([*words, "--latents-dtype", dtype, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    store = TokenStore(tmp_path / "store")
    source = store.source("a")
    assert store.image_shape == SHAPE and store.has_latents
    stored = source.document_values("image", 0, source.num_documents)
    assert stored.dtype == dtype
    found = sorted((store.label("a", number) or "", array.tobytes()) for number, array in enumerate(stored))
    assert found == sorted((label, array.tobytes()) for label, array in zip(LABELS, latents(dtype), strict=True))
    wide = latents(dtype).astype(np.float64).reshape(-1, 5)
    np.testing.assert_allclose(report["images"]["mean"], wide.mean(0), rtol=1e-12)
    np.testing.assert_allclose(report["images"]["std"], wide.std(0), rtol=1e-12)
    assert main(["data", "verify", str(store.path)]) == 0
    assert main(["data", "inspect", str(store.path)]) == 0
    assert f"latents of 4 x 6, 5 channels, {dtype}: 5 read; mean [" in capsys.readouterr().out


def unfit(change: Callable[[NDArray[Any]], Any]) -> dict[str, Any]:
    return {"latents": change(latents()), "labels": LABELS}


def with_number(value: float) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def change(found: NDArray[Any]) -> NDArray[Any]:
        found[2, 1, 3, 4] = value
        return found

    return change


@pytest.mark.parametrize(
    ("arrays", "words", "message"),
    [
        (unfit(lambda found: found.transpose(0, 3, 1, 2)), [], "all.npz:0: the latent has the shape (5, 4, 6), and"),
        (unfit(lambda found: found[..., 0]), [], "latents has the shape (5, 4, 6); use (n, height, width, channels)"),
        (unfit(lambda found: found.astype("float32")), [], "all.npz:0: the latent is float32, and the store float16"),
        (unfit(lambda found: found), ["--latents-dtype", "float32"], "is float16, and the store float32"),
        (unfit(lambda found: found.astype("uint8")), [], "the latent is uint8, and the store float16"),
        (unfit(with_number(float("nan"))), [], "all.npz:2: the latent has NaN or infinity"),
        (unfit(with_number(float("inf"))), [], "all.npz:2: the latent has NaN or infinity"),
        (unfit(lambda found: found[:3]), [], "3 latents and 5 labels; use one label per image"),
        ({"images": [], "labels": []}, [], "no array 'latents'; it has images, labels"),
        (unfit(lambda found: found), ["--images", "4x6x3"], "--images and --latents: a store has one of them"),
        (unfit(lambda found: found), ["--resize", "crop"], "--resize: it is for pixels, and --latents are floats"),
        (unfit(lambda found: found), ["--latents", "4x6"], "--latents 4x6: must be HEIGHTxWIDTHxCHANNELS"),
        (unfit(lambda found: found), ["--latents", "999x999x3"], "--latents: 5,988,006 bytes per image"),
    ],
)
def test_unfit_ones_are_refused(
    arrays: dict[str, Any], words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "all.npz", **arrays)
    asked = ["data", "prepare", str(tmp_path / "all.npz"), *WORDS, *words, "--out", str(tmp_path / "store")]
    assert main(asked) == 78
    assert message in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_broken_files_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "files", "float16")
    whole = npy(latents()[0])
    for name, content in {"empty": b"", "short": whole[:-3], "objects": npy(np.array([{}], dtype=object))}.items():
        (tmp_path / "files" / "cat" / f"{name}.npy").write_bytes(content)
    # A header that asks for an exabyte.
    large = whole.replace(b"(4, 6, 5), ", b"(9" + b"9" * 17 + b",), ")
    (tmp_path / "files" / "cat" / "large.npy").write_bytes(large)
    words = ["data", "prepare", str(tmp_path / "files"), *WORDS, "--out", str(tmp_path / "store"), "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"]["broken image"]["count"] == 4
    assert report["sources"]["a"]["documents"] == 5
    assert (
        main(["data", "prepare", str(tmp_path), "--images", "4x6x3", "--latents-dtype", "float16", "--out", "x"]) == 78
    )
    assert "--latents-dtype float16: it belongs to --latents" in capsys.readouterr().err


def test_stores_of_pixels_and_latents_are_not_taken_for_one_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL", reason="pixels are read by Pillow")
    shape = (8, 8, 1)
    np.savez(tmp_path / "pixels.npz", images=np.zeros((4, *shape), dtype=np.uint8), labels=range(4))
    np.savez(tmp_path / "latents.npz", latents=np.zeros((4, *shape), dtype=np.float16), labels=range(4))
    for kind, option in (("pixels", "--images"), ("latents", "--latents")):
        words = ["data", "prepare", str(tmp_path / f"{kind}.npz"), option, "8x8x1", "--validation", "0", "--name", "a"]
        assert main([*words, "--out", str(tmp_path / kind)]) == 0
    with pytest.raises(UserError, match=r"has images of 8 x 8 x 1 .*, and data.stores.one .* has latents of 8 x 8 x 1"):
        SeveralStores({"one": tmp_path / "latents", "two": tmp_path / "pixels"})
    for kind, latent, message in (
        ("pixels", True, "has pixels, and model.patches.latents = true; use false, or a store of latents (--latents)"),
        ("latents", False, "has latents, and model.patches.latents = false; use true, or a store of pixels (--images)"),
    ):
        model = load("lightnet-dit-digits", [f"model.patches.latents={str(latent).lower()}"]).model
        store = TokenStore(tmp_path / kind)
        with pytest.raises(UserError, match=re.escape(message)):
            Diffusion(DiffusionTaskConfig(), model).check_store(model, store, ["a"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.patches.channels=4"], "model.patches.channels = 4: pixels have 1 (grey) or 3 (RGB)"),
        (["model.patches.mean=[1.5]"], "model.patches.mean = [1.5]: pixels are 0 to 1"),
        (["model.patches.mean=[-0.1]"], "model.patches.mean = [-0.1]: pixels are 0 to 1"),
        (["model.patches.latents=true", "model.patches.mean=[0.1, 0.2]"], "has 2 numbers for 1 channels"),
        (["model.patches.latents=true", "task.augmentation.rand_augment_ops=1"], "latents can be flipped alone"),
        (["model.patches.latents=true", "task.augmentation.random_erasing=0.5"], "latents can be flipped alone"),
        (["model.patches.latents=true", "task.augmentation.crop_scale=[0.5, 1.0]"], "latents can be flipped alone"),
    ],
)
def test_configurations_that_do_not_fit_are_named(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load("lightnet-dit-digits", words)


def test_only_models_of_noise_read_latents() -> None:
    with pytest.raises(UserError, match=re.escape('model.patches.latents = true with task.name = "classify-image"')):
        load("vit-digits", ["model.patches.latents=true"])
    flipped = load("lightnet-dit-digits", ["model.patches.latents=true", "task.augmentation.horizontal_flip=0.5"])
    assert flipped.model.patches is not None and flipped.model.patches.latents
