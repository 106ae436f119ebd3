"""A store that an earlier lightscale wrote (``golden/format-1``): read as before, upgraded, and the same data."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightscale.cli import main
from lightscale.data_pipeline import whole_files
from lightscale.data_pipeline.loading.loader import TokenLoader
from lightscale.data_pipeline.store import upgrade
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.store.upgrade import upgrade_store
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.errors import UserError

GOLDEN = Path(__file__).parent / "golden"
# Made with the last version of lightscale that wrote format 1: of the store, the fingerprint; of 30 steps of 4 × 32
# tokens with seed 3, the sha256 of all tensors and the loader's state.
EXPECTED = json.loads((GOLDEN / "format-1.json").read_text())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "format-1", tmp_path / "old"))


def silent(step: str, done: int, total: int) -> None:
    pass


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def trained_on(path: Path) -> dict[str, Any]:
    """What ``EXPECTED`` has."""
    store = TokenStore(path)
    found: dict[str, Any] = {"fingerprint": store.fingerprint()}
    for packing in ("concat", "whole"):
        loader = TokenLoader(
            store,
            sequence_length=32,
            global_batch_size=4,
            micro_batch_size=2,
            packing=packing,  # type: ignore[arg-type]
            seed=3,
        )
        digest = hashlib.sha256()
        for _ in range(30):
            for batch in loader.next_step():
                for tensor in (batch.tokens, batch.labels, batch.loss_mask, batch.positions):
                    digest.update(tensor.contiguous().numpy().tobytes())
        found[packing] = digest.hexdigest()
        state = loader.state_dict()
        # States of that time had no position in the data, which is that of the tokens where nothing is skipped.
        assert state.pop("position") == state["tokens"]
        found[f"{packing} state"] = state
        loader.load_state_dict(EXPECTED[f"{packing} state"])
    return found


def test_an_old_store_is_read_as_it_always_was(old: Path) -> None:
    before = content(old)
    assert trained_on(old) == EXPECTED
    store = TokenStore(old)
    assert not store.is_checked
    loader = TokenLoader(store, sequence_length=32, global_batch_size=4, micro_batch_size=2)
    assert loader.description()[-1].endswith(f"`lightscale data upgrade {old}` adds them")
    assert verify_store(old, silent).faults == []
    assert content(old) == before


@pytest.mark.parametrize("in_place", [True, False])
def test_an_upgraded_store_is_the_same_data(
    old: Path, tmp_path: Path, in_place: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(old)
    new = old if in_place else tmp_path / "new"
    assert main(["data", "upgrade", str(old), *([] if in_place else ["--out", str(new)])]) == 0
    assert f"{new}: upgraded to format 2; fingerprint {EXPECTED['fingerprint']}" in capsys.readouterr().out
    assert trained_on(new) == EXPECTED
    store = TokenStore(new)
    assert (store.format_version, store.is_checked) == (2, True)
    assert store.source("old").origin(0) is None
    assert verify_store(new, silent).faults == []
    if not in_place:
        assert content(old) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"old", new.name})
    shard = new / "old" / "tokens" / "c" / "1"
    shard.write_bytes(shard.read_bytes().replace(b"d", b"e", 1))
    with pytest.raises(UserError, match=r"old/tokens/c/1: source old, shard 1, block 0 \(tokens 512 to 1,023\)"):
        store.source("old").read(600, 601)
    assert main(["data", "upgrade", str(new)]) == 0
    assert "nothing to do: it is of format 2" in capsys.readouterr().out


class Killed(BaseException):
    """Stands for the end of the process."""


def test_an_upgrade_that_is_interrupted_anywhere_leaves_a_whole_store(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends before any of the calls that bring something to the disk."""
    sync, counts = whole_files.sync, [0, 0]

    def dying(path: Path) -> None:
        counts[0] += 1
        if counts[0] == counts[1]:
            raise Killed
        sync(path)

    monkeypatch.setattr(whole_files, "sync", dying)
    upgrade_store(Path(shutil.copytree(old, tmp_path / "whole")), silent)
    total = counts[0]
    assert total > 20
    versions = []
    for last in (1, total // 3, 2 * total // 3, total - 2, total - 1, total):
        path = Path(shutil.copytree(old, tmp_path / str(last)))
        counts[:] = [0, last]
        with pytest.raises(Killed):
            upgrade_store(path, silent)
        store = TokenStore(path)
        versions.append(store.format_version)
        assert store.fingerprint() == EXPECTED["fingerprint"]
        assert verify_store(path, silent).faults == []
        counts[:] = [0, 0]
        upgrade_store(path, silent)
        assert content(path) == content(tmp_path / "whole")
    assert versions == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_damaged_store_is_not_upgraded(old: Path, tmp_path: Path, in_place: bool) -> None:
    shard = old / "old" / "tokens" / "c" / "1"
    shard.write_bytes(shard.read_bytes().replace(b"d", b"e", 1))
    before = content(old)
    with pytest.raises(
        UserError, match=(r"old: the store is damaged and does not change: .*old/tokens/c/1: content hash")
    ):
        upgrade_store(old, silent, out=None if in_place else tmp_path / "new")
    assert content(old) == before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_store_that_changes_meanwhile_is_not_upgraded(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes are made only of what was verified."""
    shard = old / "old" / "tokens" / "c" / "0"

    def change_then_report(step: str, done: int, total: int) -> None:
        if step == "hash blocks" and not done:
            shard.write_bytes(shard.read_bytes().replace(b"d", b"e", 1))

    with pytest.raises(UserError, match="tokens/c/0: the file changed during the upgrade; the store does not"):
        upgrade_store(old, change_then_report)
    assert not TokenStore(old).is_checked
    assert not (old / "old" / "hashes").exists()


@pytest.mark.parametrize("what", ["exists", "locked"])
def test_mistakes(old: Path, tmp_path: Path, what: str) -> None:
    before = content(old)
    if what == "exists":
        (tmp_path / "new").write_text("kept")
        with pytest.raises(UserError, match="never overwritten"):
            upgrade_store(old, silent, out=tmp_path / "new")
    else:
        with upgrade._locked(old), pytest.raises(UserError, match="another process is upgrading it"):
            upgrade_store(old, silent)
    assert content(old) == before
