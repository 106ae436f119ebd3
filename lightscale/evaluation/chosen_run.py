"""Which run, checkpoint and tokenizer are meant, found and checked without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightscale.config.arguments import require_run
from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.config.tasks import task_class
from lightscale.data_pipeline.tokenizers import Tokenizer, load_tokenizer
from lightscale.errors import UserError
from lightscale.kernels.operators import state_grows
from lightscale.models.registry import check_model, layer_operators
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import checkpoints_of_step, list_checkpoints


@dataclass(frozen=True, kw_only=True)
class ChosenRun:
    """A run that has checkpoints, and its tokenizer."""

    directory: RunDirectory
    config: RunConfig
    step: int | None
    """Of the checkpoint; None: the newest whole one, which is known when it has been read."""
    tokenizer: Tokenizer
    tokenizer_origin: Path
    """The run or store that it is from."""

    def require_average(self, name: str) -> None:
        """Raise ``UserError`` unless the run keeps an average of this name."""
        if name not in self.config.optimizer.ema:
            known = ", ".join(self.config.optimizer.ema) or "none"
            raise UserError(f"--ema {name}: {self.directory.path} keeps no such average; optimizer.ema has: {known}")


# Of one process. The run's own layout does not matter: the shards of a checkpoint say which part of a tensor they are.
_ONE_PROCESS = (
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "parallel.sequence=1",
    "parallel.data=none",
    "parallel.virtual_stages=1",
    "parallel.exchange=gather",
    "parallel.attention=gather",
    "parallel.ranks_per_node=none",
)


def choose_run(
    run: str | Path,
    *,
    step: int | None = None,
    store: Path | None = None,
    overrides: Sequence[str] = (),
    may_wait: bool = False,
    any_task: bool = False,
) -> ChosenRun:
    """The checkpoint that ``restore`` loads.

    Args:
        run: the run's directory.
        step: of the checkpoint; None takes the newest whole one.
        store: token store whose tokenizer is used; None takes the run's own. Runs from before, which keep none, have
            that of the store that their configuration names.
        overrides: `section.key=value` over the run's configuration, with which each rank holds the whole model unless
            they say otherwise.
        may_wait: whether the run need not have a checkpoint yet.
        any_task: whether its model need not predict the next token.

    Raises:
        UserError: no such run, store or checkpoint, a model of another task than ``causal`` (unless ``any_task``), a
            damaged tokenizer, or a layout that the model cannot have.
    """
    directory = RunDirectory(run)
    require_run(directory.path)
    config = load(directory.config, [*_ONE_PROCESS, *overrides])
    check_model(config.model, config.parallel)
    task = task_class(config.task.name)
    if not any_task and not task.writes_text:
        cure = "use a run of texts" if task.reads_images else "use `lightscale predict` for this model"
        if task.predicts_noise:
            cure = "use `lightscale draw` for this model"
        raise UserError(
            f'{directory.path}: its task.name = "{config.task.name}": only models that predict the next token '
            f'(task.name = "causal") score and generate text; {cure}'
        )
    if not may_wait:
        _check_step(directory, step)
    origin = _tokenizer_origin(directory, config, store)
    return ChosenRun(
        directory=directory, config=config, step=step, tokenizer=load_tokenizer(origin), tokenizer_origin=origin
    )


def longest_context(config: RunConfig) -> int | None:
    """Tokens of a prompt that a model can be asked about; None: any number.

    A layer that attends to all tokens with rotary positions gives noise beyond the length of training's sequences.
    """
    if not any(map(state_grows, layer_operators(config.model))):
        return None
    return max([config.data.sequence_length, *(stage.sequence_length for stage in config.data.curriculum)])


def _check_step(directory: RunDirectory, step: int | None) -> None:
    names = list_checkpoints(directory.checkpoints)
    if not names:
        raise UserError(f"{directory.path} has no checkpoint yet; wait for the first save of the run")
    if step is not None:
        checkpoints_of_step(directory.checkpoints, step)


def _tokenizer_origin(directory: RunDirectory, config: RunConfig, store: Path | None) -> Path:
    """Where the tokenizer is: in ``store``, in the run, or in the store that the run's configuration names."""
    if store is not None:
        if not store.exists():
            raise UserError(f"--store {store}: no token store")
        return store
    if directory.tokenizer.exists():
        return directory.path
    store = next(iter(config.data.store_paths.values()))  # all of them have the same
    if not store.exists():
        raise UserError(
            f"{store}: the token store of {directory.config} is missing, and the run stores no tokenizer. The path is "
            "relative to the directory where the run was started: change to it, or use --store PATH"
        )
    return store
