"""A trained model, ready to be used: the weights of any run's checkpoint on one process, and its tokenizer."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightscale.config.arguments import require_run
from lightscale.config.files import load
from lightscale.config.schema import ParallelConfig, RunConfig
from lightscale.data_pipeline.tokenizers import Tokenizer, load_tokenizer
from lightscale.errors import UserError
from lightscale.models.language_model import LanguageModel
from lightscale.models.registry import check_model
from lightscale.parallel.mesh import start_mesh
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.build import build_engine
from lightscale.training.checkpoints.directories import list_checkpoints, steps_of
from lightscale.training.checkpoints.restore import Checkpoints, Restored


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode with all that is needed to feed it text."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    step: int
    """Optimizer steps that the weights have seen."""
    checkpoint: Path
    refused: tuple[str, ...]
    """Why newer checkpoints were skipped, one line each."""


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
    directory = RunDirectory(run)
    config = _read_config(directory)
    # One process whatever the run's layout: the shards of a checkpoint say which part of a tensor they are.
    check_model(config.model, ParallelConfig())
    _check_step(directory, step)
    chosen = _choose_store(directory, config, store)
    tokenizer = load_tokenizer(chosen)
    with (
        tempfile.TemporaryDirectory(prefix="lightscale-") as folder,
        start_mesh(device=device, init_method=f"file://{folder}/rendezvous") as mesh,
    ):
        engine = build_engine(config, mesh, vocab_size=tokenizer.vocab_size, trainable=False)
        checkpoints = Checkpoints(directory.checkpoints, mesh, parts=["data"])
        restored = checkpoints.restore(engine, step=step, weights_only=True)
        assert restored is not None, "there were checkpoints a moment ago"
        _check_tokenizer(tokenizer, chosen, restored)
        model = engine.module.eval()
        assert isinstance(model, LanguageModel)
        yield LoadedModel(
            model=model,
            tokenizer=tokenizer,
            config=config,
            step=restored.step,
            checkpoint=restored.path,
            refused=restored.refused,
        )


def _read_config(directory: RunDirectory) -> RunConfig:
    require_run(directory.path)
    return load(directory.config)


def _check_step(directory: RunDirectory, step: int | None) -> None:
    names = list_checkpoints(directory.checkpoints)
    if not names:
        raise UserError(f"{directory.path} has no checkpoint yet; the run must have saved one")
    if step is not None and step not in {name.step for name in names}:
        raise UserError(f"{directory.checkpoints} has no checkpoint of step {step}; it has: {steps_of(names)}")


def _choose_store(directory: RunDirectory, config: RunConfig, store: Path | None) -> Path:
    """Where the tokenizer is: in ``store``, in the run, or in the store that the run's configuration names."""
    if store is not None:
        if not store.exists():
            raise UserError(f"--store {store}: no token store there")
        return store
    if directory.tokenizer.exists():
        return directory.path
    if not config.data.store.exists():
        raise UserError(
            f"{config.data.store}: the token store that {directory.config} names is not there, and the run keeps no "
            "tokenizer. The path is relative to the directory where the run was started: change to it, or use "
            "--store PATH"
        )
    return config.data.store


def _check_tokenizer(tokenizer: Tokenizer, store: Path, restored: Restored) -> None:
    expected = restored.common["data"]["fingerprint"]["tokenizer"]
    if tokenizer.sha256 != expected:
        raise UserError(
            f"{store}: its tokenizer ({tokenizer.name}, sha256 {tokenizer.sha256[:16]}…) is not the one that "
            f"{restored.path} was trained with (sha256 {expected[:16]}…); use a store that has it, by --store"
        )
