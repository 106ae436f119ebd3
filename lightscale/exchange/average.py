"""A run whose weights are the mean of the weights of checkpoints, or an average that training kept (``optimizer.ema``).

The mean of checkpoints near the end of a run often has a lower loss than each (arXiv 2203.05482, arXiv 1803.05407).
`evaluate`, `generate`, `export` and ``train.init_from`` take the new run as any other.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightscale.config.files import load
from lightscale.data_pipeline.chat.recorded import kept_template
from lightscale.data_pipeline.whole_files import whole_directory
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun
from lightscale.evaluation.prediction.request import class_names
from lightscale.exchange.files.stored_tensors import StoredTensors
from lightscale.exchange.files.weights import TensorRows
from lightscale.exchange.files.written_run import write_run
from lightscale.models.accounting import parameter_shapes
from lightscale.parallel.optimizer_spec import average_state
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import WEIGHTS_PREFIX, directory_name, list_checkpoints
from lightscale.training.checkpoints.reader import read_headers, read_state, verify
from lightscale.training.checkpoints.reading import DamagedCheckpoint


def average(chosen: Sequence[ChosenRun], target: Path, *, ema: str | None = None) -> Path:
    """Write the mean of the weights of checkpoints, all with the same factor, as the run ``target``; its checkpoint.

    The configuration and the step are those of the last of ``chosen``.

    Args:
        chosen: at least one; each with a step, or the newest whole checkpoint.
        target: of the new run.
        ema: name of the average in ``optimizer.ema``; None: the weights.

    Raises:
        UserError: something is at ``target``, a checkpoint is damaged or of another model or tokenizer, or has no such
            average; nothing is written then.
    """
    if os.path.lexists(target):
        raise UserError(f"--to {target}: it exists; use a new run")
    for run in chosen:
        if ema is not None:
            run.require_average(ema)
    _check_equal(chosen)
    opened = [_opened(run, ema) for run in chosen]
    last, source = chosen[-1], opened[-1]
    names = " and ".join(f"{run.directory.path.name}@{one.step}" for run, one in zip(chosen, opened, strict=True))
    with whole_directory(target, others_are_equal=False) as draft:
        write_run(
            draft,
            # As it is: that of the choice is of one process.
            load(last.directory.config),
            last.tokenizer,
            # Of texts with labels, and of images.
            classes=class_names(last) if last.config.model.head or last.config.model.diffusion else [],
            chat=kept_template(last.directory.path),
            shapes=source.tensors.shapes(),
            blocks=_means([one.tensors for one in opened]),
            step=source.step,
            tokens=source.tokens,
            # A mean with one that mistook parameters is as wrong as that.
            numbering=min(one.numbering for one in opened),
            reason=f"{'mean' if ema is None else f'average {ema}'} of {names}",
        )
    return RunDirectory(target).checkpoints / directory_name(source.step, "weights")


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A verified checkpoint."""

    path: Path
    step: int
    tokens: int
    numbering: str
    tensors: StoredTensors


def _opened(chosen: ChosenRun, ema: str | None) -> _Source:
    """That of the step that was chosen, or the newest that is whole."""
    refused = []
    for name in reversed(list_checkpoints(chosen.directory.checkpoints)):
        # Weights-only checkpoints have no averages.
        if chosen.step not in (None, name.step) or (ema is not None and name.contents != "full"):
            continue
        path = chosen.directory.checkpoints / name.directory
        try:
            manifest = verify(path, name.step)
            data = read_state(path, manifest, ["data"])["data"]
        except DamagedCheckpoint as error:
            refused.append(str(error))
            continue
        if data["fingerprint"]["tokenizer"] != chosen.tokenizer.sha256:
            raise UserError(f"{path} was trained with another tokenizer than that of {chosen.tokenizer_origin}")
        prefix = WEIGHTS_PREFIX if ema is None else f"{average_state(ema)}."
        tensors = StoredTensors(path, read_headers(path, manifest), prefix=prefix)
        if tensors.shapes() != dict(sorted(parameter_shapes(chosen.config.model).items())):
            raise UserError(f"{path} is of another model than {chosen.directory.config}")
        numbering = manifest.facts.get("numbering", "")
        return _Source(path=path, step=name.step, tokens=data["tokens"], numbering=numbering, tensors=tensors)
    if refused:
        raise UserError("no intact checkpoint:\n" + "\n".join(f"  {line}" for line in refused))
    of_step = "" if chosen.step is None else f" of step {chosen.step}"
    raise UserError(f"--ema {ema}: {chosen.directory.path} has no full checkpoint{of_step}; only these have averages")


def _check_equal(chosen: Sequence[ChosenRun]) -> None:
    """All are of one model and one tokenizer: the mean of others is no model."""
    first, *others = chosen
    for run in chosen:
        if run.config.adapters is not None:
            raise UserError(
                f"{run.directory.path} has adapters: the means of A and B are no mean of B A; export it with --merge"
            )
    for run in others:
        if run.config.model != first.config.model:
            raise UserError(f"{run.directory.path} is of another model than {first.directory.path} ([model])")
        if run.tokenizer.sha256 != first.tokenizer.sha256:
            raise UserError(f"{run.directory.path} has another tokenizer than {first.directory.path}")


def _means(sources: Sequence[StoredTensors]) -> Iterator[memoryview]:
    """Bytes of the mean, fp32, summed in fp64: few rows of every source in memory at once."""
    for key in sources[0].shapes():
        rows = TensorRows(key=key)
        with ExitStack() as stack:
            parts = [stack.enter_context(closing(source.blocks(rows))) for source in sources]
            for blocks in zip(*parts, strict=True):
                yield _mean(blocks).reshape(-1).view(torch.uint8).numpy().data


def _mean(blocks: Sequence[Tensor]) -> Tensor:
    total = blocks[0].double()
    for block in blocks[1:]:
        total += block.double()
    return (total / len(blocks)).float()
