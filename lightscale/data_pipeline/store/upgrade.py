"""Brings a store of an earlier format to this one: adds the hashes of blocks to its arrays.

The whole store is verified first, and each shard again while its blocks are hashed: only prepared data gets hashes. The
store's own ``zarr.json`` comes last, by one rename. Until then it is a complete store of its old format, also for its
readers. An old store has no record of the origins of its documents, so it gets none.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightscale.data_pipeline.executors import Progress, ProgressMeter
from lightscale.data_pipeline.store.array_group import ArrayGroup
from lightscale.data_pipeline.store.format import (
    FORMAT_VERSION,
    HASHES_DIR,
    hash_attributes,
    publish,
    read_root,
    require_absent,
)
from lightscale.data_pipeline.store.shards import (
    ShardHashes,
    hash_shard,
    read_json,
    read_metadata,
    write_block_hashes,
    write_metadata,
)
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.whole_files import DISK_FULL_ERRNOS, whole_directory, whole_file
from lightscale.errors import UserError, remedy_of_limit
from lightscale.files import lock_or_refuse

_STEP = "hash blocks"


def upgrade_store(path: Path, progress: Progress, *, out: Path | None = None) -> bool:
    """Upgrade the store at ``path``, or a copy of it at ``out``; whether there was something to do.

    ``UserError`` for a store that is not whole, or cannot be written; it stays as it was.
    """
    if read_root(path).is_checked:
        return False
    if out is not None:
        require_absent(out)
    faults = verify_store(path, progress).faults
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise UserError(f"{path}: the store is damaged and does not change: {faults[0]}{more}; prepare it again")
    try:
        if out is None:
            with _locked(path):
                _upgrade(path, progress)
        else:
            _upgrade_copy(path, out, progress)
    except OSError as error:
        full = error.errno in DISK_FULL_ERRNOS
        remedy = remedy_of_limit(error) if full else "use --out PATH to write an upgraded copy elsewhere"
        raise UserError(f"{out or path}: cannot write ({error.strerror}); {remedy}") from error
    return True


def _upgrade_copy(path: Path, out: Path, progress: Progress) -> None:
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(path, temporary)
        _upgrade(temporary, progress)
        publish(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other upgrades of the store out, until this process ends."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        lock_or_refuse(descriptor, path, held="another process is upgrading it")
        yield
    finally:
        os.close(descriptor)


def _upgrade(path: Path, progress: Progress) -> None:
    root = read_root(path)
    if root.is_checked:  # another process was faster
        return
    sizes = [file.stat().st_size for name in root.sources for file in (path / name).glob("*/c/*")]
    meter = ProgressMeter(_STEP, sum(sizes), progress)
    for name in root.sources:
        _upgrade_source(path / name, meter)
    metadata = read_json(path / "zarr.json")
    metadata["attributes"]["format_version"] = FORMAT_VERSION
    if root.weights:
        metadata["attributes"]["weights"] = {name: root.weights[name] for name in root.weights if name in root.sources}
    _write_metadata(path / "zarr.json", metadata)


def _upgrade_source(directory: Path, meter: ProgressMeter) -> None:
    group = ArrayGroup(directory, is_checked=False)
    shutil.rmtree(directory / HASHES_DIR, ignore_errors=True)  # of an interrupted upgrade
    hashes: dict[str, list[ShardHashes]] = {}
    with whole_directory(directory / HASHES_DIR) as temporary:
        for name, written in group.arrays.items():
            length, layout = read_metadata(directory / name / "zarr.json")
            hashes[name] = []
            for shard, expected in enumerate(written):
                file = layout.path(directory / name, shard)
                found, blocks = hash_shard(file, layout, layout.values_in(shard, length), meter.advance)
                if found != expected:
                    raise UserError(f"{file}: the file changed during the upgrade; the store does not change")
                target = layout.hashes.path(temporary / name, shard)
                hashes[name].append(write_block_hashes(target, layout, blocks, shard_hash=found))
            write_metadata(temporary / name, layout.hashes, layout.num_hashes(length))
        _write_metadata(temporary / "zarr.json", {"attributes": {}, "zarr_format": 3, "node_type": "group"})
    metadata = read_json(group.metadata_path)
    metadata["attributes"] |= hash_attributes(hashes)
    _write_metadata(group.metadata_path, metadata)


def _write_metadata(path: Path, metadata: dict[str, Any]) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(metadata, indent=2), encoding="utf-8")
