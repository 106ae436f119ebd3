"""A trained model, ready to be used: the weights of any run's checkpoint on any ranks, and its tokenizer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun, choose_run
from lightscale.models.language_model import LanguageModel
from lightscale.models.low_rank import merge_adapters
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.parallel.rendezvous.rank_store import open_store
from lightscale.training.base import read_base
from lightscale.training.build import build_engine
from lightscale.training.checkpoints.restore import Checkpoints, Restored


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode with all that is needed to feed it text."""

    model: LanguageModel
    """The whole model, or this rank's part of it."""
    tokenizer: Tokenizer
    config: RunConfig
    step: int
    """Optimizer steps that the weights have seen."""
    checkpoint: Path
    refused: tuple[str, ...]
    """Why newer checkpoints were skipped, one line each."""
    weights_hash: str
    """xxh3-128 of the checkpoint's manifest; of a model in training of its weights."""
    is_in_training: bool = False
    """Whether the weights are in no checkpoint yet."""


@contextmanager
def load_model(
    run: str | Path, *, step: int | None = None, device: str = "auto", store: Path | None = None
) -> Iterator[LoadedModel]:
    """The model of a run on this one process, whatever layout saved it; usable until the context ends.

    Args:
        run: the run's directory.
        step: of the checkpoint; None takes the newest whole one.
        device: "auto", "cpu" or "cuda".
        store: token store whose tokenizer is used; None takes the run's own. Runs from before, which keep none, have
            that of the store that their configuration names.

    Raises:
        UserError: no such run, store or checkpoint, or a tokenizer other than the one that the run was trained with.
            All but the last are found before a process group is started.
    """
    chosen = choose_run(run, step=step, store=store)
    with start_mesh(device=device) as mesh:
        yield restore(chosen, mesh)


@contextmanager
def mesh_of(config: RunConfig) -> Iterator[Mesh]:
    """The ranks of torchrun's environment variables, in the layout of ``config``; without the variables one rank."""
    parallel, environ = config.parallel, os.environ
    axes: dict[str, Any] = {
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "sequence": parallel.sequence,
        "exchange": parallel.exchange,
        "attention": parallel.attention,
        "device": config.train.device,
        "timeout_s": config.restart.collective_timeout_s,
    }
    if "RANK" not in environ:
        with start_mesh(**axes) as mesh:
            yield mesh
        return
    with start_mesh(
        store=open_store(environ, timedelta(seconds=config.restart.collective_timeout_s)),
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        ranks_per_node=parallel.ranks_per_node or int(environ["LOCAL_WORLD_SIZE"]),
        **axes,
    ) as mesh:
        yield mesh


def restore(chosen: ChosenRun, mesh: Mesh, *, average: str | None = None) -> LoadedModel:
    """The part of the model of ``chosen`` that this rank of ``mesh`` holds; collective over all its ranks.

    Adapters are merged. ``average``: name of the average in ``optimizer.ema`` that takes the place of the weights.
    """
    engine = build_engine(chosen.config, mesh, vocab_size=chosen.tokenizer.vocab_size, trainable=False)
    base = None if chosen.config.adapters is None else read_base(chosen.config, engine)[0]
    checkpoints = Checkpoints(chosen.directory.checkpoints, mesh, parts=["data"])
    restored = checkpoints.restore(engine, step=chosen.step, weights_only=True, average=average)
    assert restored is not None, "there were checkpoints a moment ago"
    if base is not None:
        base.check(restored.path, restored.base)
        merge_adapters(engine.chunks)
    _check_tokenizer(chosen, restored)
    model = engine.module.eval()
    assert isinstance(model, LanguageModel)
    return LoadedModel(
        model=model,
        tokenizer=chosen.tokenizer,
        config=chosen.config,
        step=restored.step,
        checkpoint=restored.path,
        refused=restored.refused,
        weights_hash=restored.manifest_xxh3_128,
    )


def _check_tokenizer(chosen: ChosenRun, restored: Restored) -> None:
    tokenizer, expected = chosen.tokenizer, restored.common["data"]["fingerprint"]["tokenizer"]
    if tokenizer.sha256 != expected:
        raise UserError(
            f"{chosen.tokenizer_origin}: its tokenizer ({tokenizer.name}, sha256 {tokenizer.sha256[:16]}…) differs "
            f"from the tokenizer of {restored.path} (sha256 {expected[:16]}…); use a store with that tokenizer: "
            "--store PATH"
        )
