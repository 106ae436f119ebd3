"""A copy of a store of preferences with the log-probabilities that a reference model gives to what counts."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.store.array_group import ArrayGroup
from lightscale.data_pipeline.store.format import (
    HASHES_DIR,
    REFERENCE,
    content_hash,
    hash_attributes,
    publish,
    require_absent,
    token_array,
    token_layout,
    write_group,
)
from lightscale.data_pipeline.store.shards import ShardWriter, read_metadata
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.whole_files import DISK_FULL_ERRNOS
from lightscale.errors import UserError, remedy_of_limit

_VALUES_AT_ONCE = 2**20


def check_without_reference(store: TokenStore, out: Path) -> None:
    """UserError if a copy of ``store`` cannot get the log-probabilities, or if something is at ``out``."""
    require_absent(out)
    if not store.is_checked:
        raise UserError(
            f"{store.path}: format {store.format_version} has no block hashes; `lightscale data upgrade` it"
        )
    for source in store.sources.values():
        if source.reference is not None:
            raise UserError(
                f"{store.path}: source {source.name} has log-probabilities of {source.reference.get('checkpoint')}; "
                "use the store that was prepared"
            )


def write_with_reference(
    store: TokenStore, out: Path, values: Mapping[str, NDArray[np.float32]], about: Mapping[str, Any]
) -> None:
    """Copy ``store`` to ``out``, with (tokens,) ``values`` beside the tokens of each source that has some.

    ``about``: the model and the layout that they were computed with. Raises UserError if the disk is full; then nothing
    is at ``out``.
    """
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(store.path, temporary)
        for name, of_source in values.items():
            _add_array(temporary / name, of_source, about)
        publish(temporary, out)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise UserError(f"{out}: cannot write the store ({error.strerror}); {remedy_of_limit(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _add_array(directory: Path, values: NDArray[np.float32], about: Mapping[str, Any]) -> None:
    group = ArrayGroup(directory, is_checked=True)
    tokens = read_metadata(directory / "tokens" / "zarr.json")[1]
    layout = token_layout(REFERENCE, np.dtype(np.float32), tokens.shard_length, tokens.chunk_length)
    array = token_array(REFERENCE)
    writer = ShardWriter(directory / array, layout, hashes=directory / HASHES_DIR / array)
    for first in range(0, len(values), _VALUES_AT_ONCE):
        writer.append(values[first : first + _VALUES_AT_ONCE])
    writer.close()
    added = hash_attributes({array: writer.shard_hashes})
    attributes = dict(group.attributes)
    for key in ("shard_hashes", "block_hashes"):
        attributes[key] = {**attributes[key], **added[key]}
    attributes["content_hash"] = content_hash(attributes["shard_hashes"])
    write_group(directory, {**attributes, "reference": dict(about)})
