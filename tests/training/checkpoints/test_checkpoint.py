"""Checkpoints on two ranks: what is saved, kept, restored and refused.

All cases share one start of the ranks. What is resumed on another layout is in ``test_layouts.py``.
"""

import json
import os
import pickle
import random
import runpy
import shutil
import threading
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lightscale.errors import UserError
from lightscale.parallel.engine import Engine
from lightscale.training.checkpoints import saving
from lightscale.training.checkpoints.directories import Retention, directory_name, list_steps
from lightscale.training.checkpoints.manifest import NAME, hash_file, read_manifest, write_manifest
from lightscale.training.checkpoints.restore import Checkpoints, NoGoodCheckpoint
from lightscale.training.checkpoints.saving import SaveError, Saver

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]


class Scene:
    """Two ranks, two checkpoints, and a fresh copy of them for every case."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.rank, self.control = engine.mesh.rank, engine.mesh.control
        self.original, self.number = folder / "original", 0
        for step in (1, 2):
            tiny.train(engine, step, step + 1)
            Saver(self.original, engine.mesh).save(engine, step=step, common={}, facts={"tokens": step})
            if step == 1:
                self.first = tiny.own_state(engine)
        tiny.train(engine, 3, 4)
        self.other = tiny.own_state(engine)

    def copy(self, change: Callable[[Path], object] = lambda directory: None) -> Checkpoints:
        """The checkpoints in a directory of their own, after ``change`` by rank 0."""
        self.number += 1
        directory = self.folder / f"case-{self.number}"
        if self.rank == 0:
            shutil.copytree(self.original, directory)
            change(directory)
        dist.barrier(group=self.control)
        return Checkpoints(directory, self.engine.mesh)

    def saver(self, checkpoints: Checkpoints) -> Saver:
        return Saver(checkpoints.directory, self.engine.mesh)

    def refusal(self, action: Callable[[], Any], kind: type[Exception] = UserError) -> str:
        """The message of the error that ``action`` must raise, without touching weights or optimizer."""
        before = tiny.own_state(self.engine)
        try:
            action()
        except kind as caught:
            if type(caught) is not kind:
                raise
            assert tiny.differing(before, tiny.own_state(self.engine)) == [], "state changed before the refusal"
            return str(caught)
        raise AssertionError("nothing was refused")

    def is_passed_over(self, change: Callable[[Path], object]) -> str:
        """The reason for which checkpoint 2 is refused after ``change``; checkpoint 1 is then read."""
        checkpoints = self.copy(lambda directory: change(directory / directory_name(2)))
        message = self.refusal(lambda: checkpoints.restore(self.engine, step=2), NoGoodCheckpoint)
        restored = checkpoints.restore(self.engine)
        assert restored is not None
        assert (restored.step, len(restored.refused)) == (1, 1)
        assert [path.name for path in restored.damaged] == [directory_name(2)]
        assert tiny.differing(self.first, tiny.own_state(self.engine)) == []
        assert restored.refused[0] in message
        return restored.refused[0]


def flip(name: str, share: float, directory: Path) -> None:
    """One bit, in the byte at ``share`` of the file's length."""
    path = directory / name
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 1 << random.Random(name).randrange(8)
    path.write_bytes(data)


def truncate(name: str, num_bytes: int, directory: Path) -> None:
    os.truncate(directory / name, num_bytes)


def remove(name: str, directory: Path) -> None:
    (directory / name).unlink()


def swap(one: str, other: str, directory: Path) -> None:
    (directory / one).rename(directory / "held")
    (directory / other).rename(directory / one)
    (directory / "held").rename(directory / other)


def refuse_damage(scene: Scene) -> None:
    names = sorted(path.name for path in (scene.original / directory_name(2)).iterdir())
    with_content = [name for name in names if (scene.original / directory_name(2) / name).stat().st_size]
    assert {NAME, "state.json", *(f"rank-{r:05d}.{kind}" for r in (0, 1) for kind in ("safetensors", "json"))} == set(
        names
    )
    for name in with_content:
        size = (scene.original / directory_name(2) / name).stat().st_size
        for share in (0.0, 0.5, 1.0):
            reason = scene.is_passed_over(partial(flip, name, share))
            assert f"{directory_name(2)}/{name}" in reason
            if name != "MANIFEST.json":
                assert "expected xxh3-128 " in reason
                assert ", found " in reason
        # The manifest's last byte is a newline, which says nothing.
        left = size - 2 if name == "MANIFEST.json" else size - 1
        reason = scene.is_passed_over(partial(truncate, name, left))
        assert f"/{name}" in reason
        if name != "MANIFEST.json":
            assert f"expected {size} bytes, found {left}" in reason
    for name in names:
        reason = scene.is_passed_over(partial(remove, name))
        assert f"/{name}" in reason
        assert ("missing" if name == "MANIFEST.json" else "found No such file or directory") in reason
    reason = scene.is_passed_over(partial(swap, "rank-00000.json", "rank-00001.json"))
    assert "/rank-0000" in reason
    assert ".json: expected" in reason
    reason = scene.is_passed_over(partial(swap, "state.json", "rank-00000.safetensors"))
    assert "bytes, found" in reason

    # A directory under another's name.
    checkpoints = scene.copy(lambda directory: (directory / directory_name(2)).rename(directory / directory_name(9)))
    restored = checkpoints.restore(scene.engine)
    assert restored is not None and restored.step == 1
    assert "expected step 9, found 2" in restored.refused[0]


def refuse_the_unfinished(scene: Scene) -> None:
    """What an interrupted save leaves is no checkpoint."""

    def interrupt(directory: Path) -> None:
        (directory / directory_name(2)).rename((directory / directory_name(2)).with_suffix(".tmp"))

    checkpoints = scene.copy(interrupt)
    restored = checkpoints.restore(scene.engine)
    assert restored is not None
    assert (restored.step, restored.refused) == (1, ())
    # The next save takes its place.
    scene.saver(checkpoints).save(scene.engine, step=5, common={}, facts={})
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == [directory_name(1), directory_name(5)]


def refuse_when_none_is_good(scene: Scene) -> None:
    def spoil(directory: Path) -> None:
        flip("state.json", 0.5, directory / directory_name(1))
        (directory / directory_name(2) / "MANIFEST.json").unlink()

    checkpoints = scene.copy(spoil)
    message = scene.refusal(lambda: checkpoints.restore(scene.engine), NoGoodCheckpoint)
    assert len(message.splitlines()) == 3
    assert f"{directory_name(1)}/state.json: expected" in message
    assert f"{directory_name(2)}/MANIFEST.json is missing" in message
    # Even if the only one has lost its manifest, the run must not begin again.
    checkpoints = scene.copy(leave_one_without_manifest)
    scene.refusal(lambda: checkpoints.restore(scene.engine), NoGoodCheckpoint)
    assert Checkpoints(scene.folder / "nothing", scene.engine.mesh).restore(scene.engine) is None
    checkpoints = scene.copy()
    message = scene.refusal(lambda: checkpoints.restore(scene.engine, step=7))
    assert "has no checkpoint of step 7; it has: 1, 2" in message


def leave_one_without_manifest(directory: Path) -> None:
    shutil.rmtree(directory / directory_name(1))
    (directory / directory_name(2) / "MANIFEST.json").unlink()


def refuse_another_format(scene: Scene) -> None:
    def modernise(directory: Path) -> None:
        path = directory / directory_name(2)
        manifest = read_manifest(path)
        (path / NAME).unlink()
        write_manifest(path, manifest.files, {**manifest.facts, "format": 3})

    checkpoints = scene.copy(modernise)
    # Not passed over: the older checkpoint would undo what a newer lightscale has trained.
    message = scene.refusal(lambda: checkpoints.restore(scene.engine))
    assert f"{directory_name(2)}/MANIFEST.json has format 3, and this version of lightscale reads 2" in message


def keep_what_is_there(scene: Scene) -> None:
    """A directory of the step that is saved: whole of this state, whole of another, damaged."""
    checkpoints = scene.copy()
    saver, target = scene.saver(checkpoints), checkpoints.directory / directory_name(2)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in target.iterdir()}
    assert saver.save(scene.engine, step=2, common={}, facts={"tokens": 2}).path == target
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in target.iterdir()} == before
    message = scene.refusal(lambda: saver.save(scene.engine, step=2, common={}, facts={"tokens": 3}), SaveError)
    assert f"{target} is an intact checkpoint of another state (tokens: 2 in the checkpoint, 3 now)" in message
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in target.iterdir()} == before
    for name in (".bad", ".bad1"):
        dist.barrier(group=scene.control)
        if scene.rank == 0:
            flip("state.json", 0.5, target)
        dist.barrier(group=scene.control)
        saver.save(scene.engine, step=2, common={}, facts={"tokens": 3})
        assert target.with_suffix(name).is_dir()
    restored = checkpoints.restore(scene.engine)
    assert restored is not None
    assert (restored.step, restored.refused) == (2, ())
    assert list_steps(checkpoints.directory) == [1, 2]


def save_what_was_there_at_the_call(scene: Scene) -> None:
    """Training continues at once and changes every weight, while the copy is still being written."""
    checkpoints = scene.copy()
    saver = scene.saver(checkpoints)
    saver.reserve(scene.engine)
    for step in (3, 4):
        tiny.train(scene.engine, step, step + 1)
        at_call = tiny.own_state(scene.engine)
        held, original = threading.Event(), saving.write_tensors

        def wait_and_write(*args: Any, held: threading.Event = held, original: Any = original) -> Any:
            assert held.wait(60)
            return original(*args)

        saving.write_tensors = wait_and_write
        try:
            saver.begin(scene.engine, step=step, common={"a": [step]}, facts={})
            assert saver.is_writing and not saver.is_written
            tiny.train(scene.engine, 10, 12)
            for parameter in scene.engine.module.parameters():
                parameter.data.fill_(7.0)
            assert list_steps(checkpoints.directory)[-1] == step - 1, "it has no name before it is written"
            held.set()
            saved = saver.finish()
        finally:
            saving.write_tensors = original
        assert not saver.is_writing
        on_disk = sum(path.stat().st_size for path in saved.path.iterdir() if path.name != NAME)
        assert (saved.step, saved.num_bytes) == (step, on_disk)
        assert 0 < saved.stall_s < saved.write_s
        restored = checkpoints.restore(scene.engine)
        assert restored is not None
        assert (restored.step, restored.common) == (step, {"a": [step], "step": step})
        assert tiny.differing(at_call, tiny.own_state(scene.engine)) == []


def keep_as_many_good_ones_as_asked(scene: Scene) -> None:
    def save(saver: Saver, step: int, keep: int, keep_every: int | None = None) -> tuple[int, ...]:
        retention = Retention(keep=keep, keep_every=keep_every)
        return saver.save(scene.engine, step=step, common={}, facts={}, retention=retention).removed

    checkpoints = scene.copy()
    saver = scene.saver(checkpoints)
    assert save(saver, 3, keep=4) == ()
    assert save(saver, 4, keep=2) == (1, 2)
    assert list_steps(checkpoints.directory) == [3, 4]

    checkpoints = scene.copy()
    saver = scene.saver(checkpoints)
    assert [save(saver, step, keep=2, keep_every=2) for step in (3, 4, 5)] == [(1,), (), (3,)]
    assert list_steps(checkpoints.directory) == [2, 4, 5]

    # One that was damaged since does not count, and the older one stays for it.
    checkpoints = scene.copy(lambda directory: flip("rank-00001.safetensors", 0.7, directory / directory_name(2)))
    assert save(scene.saver(checkpoints), 3, keep=2) == ()
    names = sorted(path.name for path in checkpoints.directory.iterdir())
    assert names == [directory_name(1), f"{directory_name(2)}.bad", directory_name(3)]


def report_failing_writes(scene: Scene) -> None:
    """An error of one rank is raised on all, and nothing is left."""

    def broken(*args: Any) -> None:
        raise OSError(5, "Input/output error", "the file")

    for target, guilty in (("write_tensors", 1), ("write_synced", 0), ("sync", 0), ("write_manifest", 0)):
        checkpoints = scene.copy()
        original, saver = getattr(saving, target), scene.saver(checkpoints)
        if scene.rank == guilty:
            setattr(saving, target, broken)
        try:
            message = scene.refusal(partial(saver.save, scene.engine, step=3, common={}, facts={}), SaveError)
        finally:
            setattr(saving, target, original)
        assert f"cannot write {checkpoints.directory / directory_name(3)}: " in message, target
        assert "[Errno 5] Input/output error: 'the file'" in message, target
        assert sorted(path.name for path in checkpoints.directory.iterdir()) == [directory_name(1), directory_name(2)]
    # The next save succeeds.
    saver.save(scene.engine, step=3, common={}, facts={})
    restored = checkpoints.restore(scene.engine)
    assert restored is not None and restored.step == 3
    # A place that cannot be written.
    file = scene.folder / "file"
    file.touch()
    saver = Saver(file, scene.engine.mesh)
    message = scene.refusal(lambda: saver.save(scene.engine, step=3, common={}, facts={}), SaveError)
    assert f"cannot write {file / directory_name(3)}: " in message
    assert len(message.splitlines()) == 1


def follow_no_links(scene: Scene) -> None:
    """Links under the names of checkpoints, of drafts and of those put aside: they themselves make room."""
    elsewhere = scene.folder / "elsewhere"

    def link(directory: Path) -> None:
        (elsewhere / directory_name(2)).parent.mkdir()
        (directory / directory_name(2)).rename(elsewhere / directory_name(2))
        (directory / directory_name(2)).symlink_to(elsewhere / directory_name(2))
        (directory / directory_name(2)).with_suffix(".bad").symlink_to("nothing")
        (directory / directory_name(3)).symlink_to("nothing")
        (directory / directory_name(3)).with_suffix(".tmp").symlink_to(elsewhere)

    checkpoints = scene.copy(link)
    restored = checkpoints.restore(scene.engine)
    assert restored is not None and restored.step == 1
    assert [reason.partition(": ")[2][:15] for reason in restored.refused] == ["a symbolic link"] * 2
    checkpoints.put_aside(restored.damaged[1:])
    for step in (2, 3):
        scene.saver(checkpoints).save(scene.engine, step=step, common={}, facts={})
        assert not (checkpoints.directory / directory_name(step)).is_symlink()
    names = sorted(path.name for path in checkpoints.directory.iterdir())
    put_aside = [f"{directory_name(2)}.bad", f"{directory_name(2)}.bad1", f"{directory_name(3)}.bad"]
    assert names == sorted([*map(directory_name, (1, 2, 3)), *put_aside])
    assert len(list((elsewhere / directory_name(2)).iterdir())) == 6
    dist.barrier(group=scene.control)


def refuse_other_versions(scene: Scene) -> None:
    def age(directory: Path) -> None:
        path = directory / directory_name(2)
        manifest = read_manifest(path)
        (path / NAME).unlink()
        versions = {**manifest.facts["versions"], "torch": "1.0"}
        write_manifest(path, manifest.files, {**manifest.facts, "versions": versions})

    checkpoints = scene.copy(age)
    message = scene.refusal(lambda: checkpoints.restore(scene.engine))
    assert f"versions.torch: 1.0 in the checkpoint, {version('torch')} now" in message
    assert "--allow-change versions" in message
    scene.refusal(lambda: checkpoints.restore(scene.engine, allow=["versions.megatron-core"]))
    for allowed in ("versions", "versions.torch"):
        restored = checkpoints.restore(scene.engine, allow=[allowed])
        assert restored is not None
        assert restored.changes == (f"versions.torch: 1.0 in the checkpoint, {version('torch')} now",)
    # Weights alone have no numbers to go on with.
    assert checkpoints.restore(scene.engine, weights_only=True) is not None


class Exploit:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def run_nothing_that_is_in_a_checkpoint(scene: Scene) -> None:
    """Files of formats that can hold code, and crafted ones of our own, under a manifest with their hashes."""
    struck = scene.folder / "struck"
    pickled = pickle.dumps(Exploit(struck))
    # That the exploit works; the ranks share the folder.
    proof = scene.folder / f"proof-{scene.rank}"
    assert pickle.loads(pickle.dumps(Exploit(proof))) is None and proof.is_dir()
    proof.rmdir()
    own = ("rank-00000.safetensors", "rank-00001.safetensors", "state.json", "rank-00000.json")
    for name in (".metadata", "common.pt", "__0_0.distcp", *own):
        crafted = {
            "pickle": pickled,
            "header": (1 << 60).to_bytes(8, "little") + b"{}",
            "places": _tensors({"model.a@0": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}}),
            "negative": _tensors({"model.a@-4": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}),
            "types": _tensors({"model.a@0": {"dtype": "O", "shape": [4], "data_offsets": [0, 16]}}),
        }
        for content in crafted.values() if name in own[:2] else [pickled]:

            def plant(directory: Path, name: str = name, content: bytes = content) -> None:
                path = directory / directory_name(2)
                (path / name).write_bytes(content)
                manifest = read_manifest(path)
                (path / NAME).unlink()
                write_manifest(path, {**manifest.files, name: hash_file(path / name)}, manifest.facts)

            checkpoints = scene.copy(plant)
            restored = checkpoints.restore(scene.engine)
            assert restored is not None
            # What is not ours is refused by its name; what is ours and makes no sense is damage too.
            assert restored.step == 1, name
            assert not struck.exists(), name
            assert name in restored.refused[0] and directory_name(2) in restored.refused[0]


def _tensors(header: dict[str, Any]) -> bytes:
    text = json.dumps({"__metadata__": {"shapes": json.dumps({"model.a": [4]})}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


def start_from_weights(scene: Scene) -> None:
    """Weights alone: the optimizer is as it was before, but for its fp32 copies of the weights."""
    checkpoints = scene.copy()
    before = tiny.own_state(scene.engine)
    restored = checkpoints.restore(scene.engine, step=1, weights_only=True)
    assert restored is not None and restored.step == 1
    after = tiny.own_state(scene.engine)
    for key in before:
        if "exp_avg" in key or "step" in key or "group" in key:
            assert after[key] == before[key] if isinstance(after[key], dict) else torch.equal(after[key], before[key])
        else:
            assert torch.equal(after[key], scene.first[key]), key


def save_after_restoring(scene: Scene) -> None:
    checkpoints = scene.copy()
    checkpoints.restore(scene.engine)
    tiny.train(scene.engine, 3, 5)
    saved = tiny.own_state(scene.engine)
    scene.saver(checkpoints).save(scene.engine, step=4, common={}, facts={})
    tiny.train(scene.engine, 5, 6)
    restored = checkpoints.restore(scene.engine)
    assert restored is not None and restored.step == 4
    assert tiny.differing(saved, tiny.own_state(scene.engine)) == []
    steps = {float(value) for key, value in saved.items() if key.endswith(" step")}
    assert steps == {4.0}, "each step of the optimizer counts once"


SCENES: list[Callable[[Scene], None]] = [
    refuse_damage,
    refuse_the_unfinished,
    refuse_when_none_is_good,
    refuse_another_format,
    keep_what_is_there,
    save_what_was_there_at_the_call,
    keep_as_many_good_ones_as_asked,
    report_failing_writes,
    follow_no_links,
    refuse_other_versions,
    run_nothing_that_is_in_a_checkpoint,
    start_from_weights,
    save_after_restoring,
]


def refuse_another_model(rank: int, init_method: str, folder: Path) -> None:
    """On two stages: what one of them finds, both refuse."""
    embedding, layers = "embedding.word_embeddings.weight", "decoder.layers"
    found = {}
    for change, value in (
        ("hidden_size", 64),
        ("vocab_size", 96),
        ("intermediate_size", 64),
        ("num_layers", 2),
        ("num_layers", 6),
    ):
        with tiny.engine_on((2, 1, 2, 1), rank, f"{init_method}-{change}-{value}", **{change: value}) as engine:
            before = tiny.own_state(engine)
            try:
                Checkpoints(folder / "original", engine.mesh).restore(engine)
            except UserError as refusal:
                found[change, value] = str(refusal).removeprefix(f"{folder}/original/{directory_name(2)} ")
            assert tiny.differing(before, tiny.own_state(engine)) == []
    assert found == {
        (
            "hidden_size",
            64,
        ): f"is of another model: {layers}.0.mlp.linear_fc1.weight is (96, 32) there and (96, 64) here",
        ("vocab_size", 96): f"is of another model: {embedding} is (128, 32) there and (96, 32) here",
        (
            "intermediate_size",
            64,
        ): f"is of another model: {layers}.0.mlp.linear_fc1.weight is (96, 32) there and (128, 32) here",
        # A shorter model would find all that it looks for.
        ("num_layers", 2): f"is of another model: {layers}.2.mlp.linear_fc1.weight is (96, 32) there and missing here",
        ("num_layers", 6): f"is of another model: {layers}.4.mlp.linear_fc1.weight is missing there and (96, 32) here",
    }


def play(rank: int, world_size: int, init_method: str, folder: str) -> list[str]:
    """Every scene, on two sequence ranks."""
    with tiny.engine_on((2, 1, 1, 2), rank, init_method) as engine:
        scene = Scene(engine, Path(folder))
        for act in SCENES:
            act(scene)
            dist.barrier(group=engine.mesh.control)
    refuse_another_model(rank, init_method, Path(folder))
    return [act.__name__ for act in SCENES]


def test_what_is_refused_and_what_is_kept(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(play, 2, str(tmp_path)) == [[act.__name__ for act in SCENES]] * 2
