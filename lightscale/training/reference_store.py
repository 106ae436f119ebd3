"""Log-probabilities of a frozen reference, computed once and stored (``task.reference = "stored"``).

    lightscale reference -> write_reference: the passes that each step of the training would make, over all windows
                            -> a copy of the store with an array beside the tokens -> the loader's ``label_values``

A token keeps the number that the reference gave it, in fp32: sums are the same in training, bitwise on the ranks
and rows that computed them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightscale.config.schema import AdapterConfig, RunConfig
from lightscale.data_pipeline.loading.loader import LoaderLayout, validation_batches
from lightscale.data_pipeline.loading.packing import WholeWindows
from lightscale.data_pipeline.loading.windows import Batch, label_slices
from lightscale.data_pipeline.store.reference import write_with_reference
from lightscale.data_pipeline.store.token_store import TokenSource, TokenStore
from lightscale.errors import UserError
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import Mesh
from lightscale.training.base import read_base
from lightscale.training.beginning import REFERENCE_KEY, reference_layout
from lightscale.training.preference import Recorder, build_reference

_BATCHES_AT_ONCE = 16
"""Micro-batches that go through the pipeline together."""


def write_reference(config: RunConfig, out: Path, mesh: Mesh, *, advance: Callable[[], None] = lambda: None) -> None:
    """Write the store of ``config`` to ``out`` with the log-probabilities of its reference; collective over ``mesh``.

    ``advance`` is called again and again, at least once for each micro-batch.

    UserError if the reference is missing or damaged, or if the store has another tokenizer.
    """
    store, ranks = TokenStore(config.data.store_paths["data.store"]), Agreement(mesh.control)
    # Beside adapters the reference is the frozen model too.
    alone = config.model_copy(update={"adapter": AdapterConfig()})
    advance()
    engine = build_reference(alone, mesh, vocab_size=store.tokenizer.vocab_size)
    assert engine is not None, "checked with the request"
    base, restored = read_base(alone, engine)
    tokenizer = restored.common["data"]["fingerprint"]["tokenizer"]
    if tokenizer != store.tokenizer.sha256:
        raise UserError(
            f"{store.path} was written with another tokenizer (sha256 {store.tokenizer.sha256[:16]}…) than that of "
            f"{restored.path} (sha256 {tokenizer[:16]}…); prepare it with the model's tokenizer"
        )
    values = {
        name: token_log_probabilities(engine, source, config, padding_id=store.tokenizer.eot_id, advance=advance)
        for name, source in store.sources.items()
        if source.has_preferences
    }
    about = {**base.fact(), "layout": reference_layout(config), "device": mesh.device.type}
    ranks.on_first(lambda: write_with_reference(store, out, values, about))


def token_log_probabilities(
    engine: Engine,
    source: TokenSource,
    config: RunConfig,
    *,
    padding_id: int,
    advance: Callable[[], None],
) -> NDArray[np.float32]:
    """(tokens,) of ``source``: log-probabilities of those that count, 0 elsewhere; the same on all ranks."""
    mesh, length, b = engine.mesh, config.data.sequence_length, config.train.micro_batch_size
    layout = LoaderLayout(
        data_rank=mesh.data_rank, data_size=mesh.data, sequence_rank=mesh.sequence_rank, sequence_size=mesh.sequence
    )
    windows = WholeWindows(source, length)
    made = validation_batches(
        source,
        sequence_length=length,
        num_sequences=windows.num_windows,
        micro_batch_size=b,
        layout=layout,
        whole_documents=True,
        padding_id=padding_id,
    )
    found = np.zeros(source.num_tokens, dtype=np.float32)
    first_window = mesh.data_rank * b
    for batches in _parts(batch.to(mesh.device) for batch in made):
        recorder = Recorder()
        engine.objective = recorder
        engine.forward_only(batches, advance=advance)
        for batch in batches:
            # Only the last stage has losses.
            if (losses := recorder.found.get(id(batch))) is not None:
                _place(losses.float().cpu().numpy(), windows, first_window, found, mesh)
            first_window += b * mesh.data
    everywhere = torch.from_numpy(found)
    # Of log-probabilities, at most 0, the smallest is that of the rank that computed it.
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=mesh.control)
    return found


def _place(
    losses: NDArray[np.float32], windows: WholeWindows, first: int, out: NDArray[np.float32], mesh: Mesh
) -> None:
    """Put the (b, n) ``losses`` of the windows from ``first`` on to their labels in ``out``."""
    n = losses.shape[1]
    begin = mesh.sequence_rank * n
    for row, window in zip(losses, range(first, windows.num_windows), strict=False):
        ranges = windows.document_ranges(window, begin, begin + n)
        for slots, tokens in label_slices(ranges, begin, begin + n, windows.source.num_tokens):
            # The label behind a document is the first token of another, which never counts.
            np.minimum(out[tokens], -row[slots], out=out[tokens])


def _parts(batches: Iterator[Batch]) -> Iterator[Sequence[Batch]]:
    while part := list(islice(batches, _BATCHES_AT_ONCE)):
        yield part


def check_device(sources: Iterable[TokenSource], device: str) -> None:
    """UserError for log-probabilities of ``sources`` that were computed on another kind of device than ``device``."""
    for source in sources:
        if source.reference is not None and source.reference["device"] != device:
            raise UserError(
                f'task.reference = "stored": the log-probabilities of {source.directory} were computed on '
                f"{source.reference['device']}, and this run is on {device}; compute them again with `lightscale "
                f"reference`, or accept sums that differ in their last bits with --allow-change {REFERENCE_KEY}"
            )
