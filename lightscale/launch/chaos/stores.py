"""Stores for faults: a copy with changeable tokens, and one with other tokens."""

import json
import shutil
from pathlib import Path

from lightscale.data_pipeline.store.format import content_hash

LARGEST_STORE_BYTES = 2 << 30
_METADATA = "zarr.json"


def num_bytes(store: Path) -> int:
    """Size of all files of a store."""
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


def copy_store(store: Path, copy: Path) -> None:
    """Create `copy` again, since a killed campaign may have left it changed."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(store, copy)


def write_other_store(store: Path, other: Path) -> None:
    """Create `other` as if prepared from other tokens, with other hashes."""
    copy_store(store, other)
    for path in sorted(other.glob(f"*/{_METADATA}")):
        group = json.loads(path.read_text(encoding="utf-8"))
        hashes = group["attributes"].get("shard_hashes", {})
        # Beside the sources there are other groups, of names of files.
        if "content_hash" in group["attributes"] and "tokens" in hashes:
            hashes["tokens"] = [digest[::-1] for digest in hashes["tokens"]]
            group["attributes"]["content_hash"] = content_hash(hashes)
            path.write_text(json.dumps(group), encoding="utf-8")
