"""The checkpoint of a run, opened for an export: its tensors stay in the files until they are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from lightscale.config.schema import AdapterConfig, RunConfig
from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.chat.recorded import kept_template
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun, longest_context
from lightscale.evaluation.prediction.request import class_names
from lightscale.exchange.files.chat_template import has_markup
from lightscale.exchange.files.merged_tensors import MergedTensors
from lightscale.exchange.files.stored_tensors import StoredTensors
from lightscale.exchange.files.weights import TensorRows, exported_tensors, run_shape, tensor_shapes
from lightscale.exchange.plain.model import Shape
from lightscale.models.adapters import adapted_maps
from lightscale.parallel.optimizer_spec import average_state
from lightscale.runs.base import base_run
from lightscale.training.checkpoints.directories import (
    WEIGHTS_PREFIX,
    CheckpointName,
    checkpoints_of_step,
    list_checkpoints,
)
from lightscale.training.checkpoints.manifest import NAME as MANIFEST
from lightscale.training.checkpoints.manifest import Manifest, hash_file
from lightscale.training.checkpoints.reader import read_headers, read_state, verify
from lightscale.training.checkpoints.reading import DamagedCheckpoint


class OpenedModel(Protocol):
    """A model whose weights are in files, of a run or of an export."""

    @property
    def shape(self) -> Shape:
        """Of the plain model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The one that it was trained with."""

    @property
    def origin(self) -> Path:
        """The checkpoint or export."""

    @property
    def refused(self) -> tuple[str, ...]:
        """Why newer checkpoints were skipped, one line each."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of a classifier's classes, by number, where the run has them."""

    @property
    def chat(self) -> Chat | None:
        """The chat template of its conversations; None: it was trained on texts."""

    @property
    def context(self) -> int | None:
        """Tokens of a text that it can be asked about; None: any number."""

    def read(self, name: str) -> Tensor:
        """A weight of the plain model, by its name there (``weights.exported_tensors``)."""


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """The verified checkpoint of a run."""

    chosen: ChosenRun
    shape: Shape
    step: int
    origin: Path
    manifest: Manifest
    tensors: StoredTensors
    rows: dict[str, TensorRows]
    refused: tuple[str, ...]
    average: str | None = None
    """The name in ``optimizer.ema`` of what the tensors are; None: the weights."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's."""
        return self.chosen.tokenizer

    @property
    def classes(self) -> list[str]:
        """Those that the run keeps."""
        return class_names(self.chosen) if self.shape.num_labels else []

    @property
    def chat(self) -> Chat | None:
        """That of the run's conversations."""
        return kept_template(self.chosen.directory.path)

    @property
    def reads_markup(self) -> bool:
        """Whether texts of its chat template spell special tokens."""
        return self.chat is not None and has_markup(self.tokenizer)

    @property
    def context(self) -> int | None:
        """See ``OpenedModel``."""
        return longest_context(self.chosen.config)

    def read(self, name: str) -> Tensor:
        """See ``OpenedModel``."""
        return self.tensors.read(self.rows[name])


def open_run(chosen: ChosenRun, *, average: str | None = None) -> TrainedRun:
    """The checkpoint of the step that was chosen, or the newest that is whole, hashed and checked as before a resume.

    ``average``: name in ``optimizer.ema`` of the average that takes the place of the weights.

    UserError where no checkpoint is whole, or none has averages, and where the tokenizer or model differs from the
    checkpoint.
    """
    shape = run_shape(chosen.config, num_ids=chosen.tokenizer.vocab_size)
    refused: list[str] = []
    # Of one step the weights alone come first: they are the same, and a third of the bytes to verify.
    for name in reversed(list_checkpoints(chosen.directory.checkpoints)):
        # Weights-only checkpoints have no averages.
        if chosen.step not in (None, name.step) or (average is not None and name.contents != "full"):
            continue
        try:
            return _opened(chosen, shape, name, tuple(refused), average)
        except DamagedCheckpoint as error:
            refused.append(str(error))
    if average is not None and not refused:
        of_step = "" if chosen.step is None else f" of step {chosen.step}"
        raise UserError(
            f"--ema {average}: {chosen.directory.path} has no full checkpoint{of_step}; only these have averages"
        )
    raise UserError("no intact checkpoint:\n" + "\n".join(f"  {line}" for line in refused))


def _opened(
    chosen: ChosenRun, shape: Shape, name: CheckpointName, refused: tuple[str, ...], average: str | None
) -> TrainedRun:
    path = chosen.directory.checkpoints / name.directory
    manifest = verify(path, name.step)
    state = read_state(path, manifest, ["data"])
    tokenizer, expected = chosen.tokenizer, state["data"]["fingerprint"]["tokenizer"]
    if tokenizer.sha256 != expected:
        raise UserError(
            f"{chosen.tokenizer_origin}: its tokenizer ({tokenizer.name}, sha256 {tokenizer.sha256[:16]}…) differs "
            f"from the tokenizer of {path} (sha256 {expected[:16]}…)"
        )
    prefix = WEIGHTS_PREFIX if average is None else f"{average_state(average)}."
    tensors = StoredTensors(path, read_headers(path, manifest), prefix=prefix)
    if chosen.config.adapters is not None:
        tensors = _merged(chosen.config, chosen.config.adapters, tensors, manifest)
    rows = exported_tensors(chosen.config.model, vocab_size=shape.vocab_size)
    tensors.check(rows, tensor_shapes(shape))
    return TrainedRun(
        chosen=chosen,
        shape=shape,
        step=name.step,
        origin=path,
        manifest=manifest,
        tensors=tensors,
        rows=rows,
        refused=refused,
        average=average,
    )


def _merged(config: RunConfig, adapter: AdapterConfig, adapters: StoredTensors, manifest: Manifest) -> MergedTensors:
    """The frozen weights of a run's ``adapters``, which are put into them as they are read.

    UserError unless the checkpoint that ``manifest`` names is there and whole.
    """
    directory, step = base_run(config)
    recorded, other = manifest.facts.get("base") or {}, ""
    try:
        for name in checkpoints_of_step(directory.checkpoints, step):
            path = directory.checkpoints / name.directory
            found = hash_file(path / MANIFEST).xxh3_128
            if found != recorded.get("manifest"):
                other = found
                continue
            headers = read_headers(path, verify(path, step))
            maps = adapted_maps(config.model, adapter)
            merged = MergedTensors(path, headers, adapters=adapters, maps=maps, adapter=adapter)
            expected = {key: shape for one in maps for key, (shape, _) in one.parameters(adapter).items()}
            if adapters.shapes() != dict(sorted(expected.items())):
                raise UserError(f"{adapters.directory} has other adapters than [adapter] of its configuration")
            return merged
        raise UserError(
            f"{adapters.directory} is an adapter of another base: {recorded.get('checkpoint', 'none')} "
            f"({recorded.get('manifest', '')[:16]}…), and this checkpoint is {other[:16]}…; restore the checkpoint "
            "that it was trained beside"
        )
    except UserError as error:
        raise UserError(f'train.init_from = "{directory.path}@{step}": {error}') from None
