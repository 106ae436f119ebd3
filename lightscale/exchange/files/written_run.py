"""A run that was not trained: configuration, tokenizer, and one checkpoint of weights that come from elsewhere."""

import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightscale.config.files import to_toml
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.data_pipeline.whole_files import write_json
from lightscale.parallel.shards import Box, Shape
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import (
    NUMBERING,
    STATE,
    TENSORS,
    WEIGHTS_PREFIX,
    directory_name,
    environment,
    rank_stem,
)
from lightscale.training.checkpoints.header import write_header
from lightscale.training.checkpoints.manifest import write_manifest, write_synced
from lightscale.training.checkpoints.tensor_file import write_blocks


def write_run(
    directory: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    classes: Sequence[str],
    chat: Chat | None,
    shapes: Mapping[str, Shape],
    blocks: Iterable[memoryview],
    step: int,
    tokens: int,
    reason: str,
    numbering: str = NUMBERING,
) -> None:
    """Write into the empty ``directory``.

    Args:
        classes: names of a classifier's classes, by number.
        shapes: of the weights, by their names in the model.
        blocks: their bytes, fp32, one weight after another in the order of ``shapes``.
        step, tokens: of the checkpoint.
        reason: where the weights come from.
        numbering: as in the manifest of the checkpoints that they come from.
    """
    run = RunDirectory(directory)
    run.config.write_text(to_toml(config), encoding="utf-8")
    run.tokenizer.mkdir()
    tokenizer.save(run.tokenizer)
    if classes:
        write_json(run.classes, list(classes))
    if chat is not None:
        write_json(run.chat, chat.description())
    run.checkpoints.mkdir()
    facts = {"step": step, "tokens": tokens, "tokenizer": tokenizer.sha256, "numbering": numbering}
    _write_weights(run.checkpoints / directory_name(step, "weights"), shapes, blocks, facts)
    run.write_status("finished", reason=reason, step=step, tokens=tokens)


def _write_weights(
    path: Path, shapes: Mapping[str, Shape], blocks: Iterable[memoryview], facts: Mapping[str, Any]
) -> None:
    path.mkdir()
    boxes = [
        Box(key=f"{WEIGHTS_PREFIX}{key}", shape=shape, offset=(0,) * len(shape), sizes=shape)
        for key, shape in shapes.items()
    ]
    name = f"{rank_stem(0)}{TENSORS}"
    header = memoryview(write_header([(box, "F32") for box in boxes]))
    files = {name: write_blocks(path / name, (block for part in ([header], blocks) for block in part))}
    data = {"tokens": facts["tokens"], "fingerprint": {"tokenizer": facts["tokenizer"]}}
    state = {"step": facts["step"], "data": data}
    files[STATE] = write_synced(path / STATE, json.dumps(state).encode())
    facts = {
        **facts,
        "contents": "weights",
        "layout": {"tensor": 1, "pipeline": 1, "sequence": 1, "data": 1},
        "versions": environment(),
        "hosts": [socket.gethostname()],
    }
    write_manifest(path, files, facts)
