"""Checks of `lightscale train` and `submit` before a run starts, on the machine of the command.

Imports no torch, except to count GPUs on a machine with a GPU driver, so that mistakes are reported within a second.
"""

import ctypes
import importlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightscale.config.arithmetic import near_multiple
from lightscale.config.fields import NAMED
from lightscale.config.layout import Layout, LayoutError, check_layout, check_mixers
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.config.sinks import check_installed
from lightscale.data_pipeline.chat.recorded import template_of
from lightscale.data_pipeline.store.several_stores import open_stores, same_classes
from lightscale.data_pipeline.store.token_store import TokenizerIdentity, TokenSource, TokenStore
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.registry import find_tasks
from lightscale.models.attention_heads import check_measured_logits
from lightscale.models.registry import shared_specs
from lightscale.models.specs.tpe import TPESpec
from lightscale.runs.run_directory import RunDirectory
from lightscale.tasks.interface import task_of
from lightscale.training.beginning import check_base, check_beginning, check_reference
from lightscale.training.branch import check_branch
from lightscale.training.optimizer.registry import optimizer_spec
from lightscale.training.teacher import check_teacher


class WrongUse(UserError):
    """A mistake in the request: a run, a file, a task, its data, a layout."""

    EXIT_CODE = 2


_DOCUMENTS_AT_ONCE = 2**20


def default_directory(config: Path) -> Path:
    """Default run directory: runs/NAME for NAME.toml; for a run's own config.toml, that run."""
    # Otherwise a command line that names a run's own file would start another run, runs/config.
    run = RunDirectory(config.parent)
    # Those of averages and imports have a status alone.
    if config.name == run.config.name and (run.events.exists() or run.status.exists()):
        return config.parent
    return Path("runs") / config.stem


def allowed_changes(keys: Sequence[str]) -> frozenset[str]:
    """The keys of ``--allow-change``."""
    for key in keys:
        section, _, rest = key.partition(".")
        known = (
            key == "lost-checkpoints"
            or section == "versions"
            or (section in RunConfig.model_fields and (not rest or rest.split(".")[0] in _keys_of(section)))
        )
        if not known:
            raise UserError(
                f"--allow-change {key}: use a key or section of the configuration such as optimizer.lr or data, "
                "versions, versions.PACKAGE, or lost-checkpoints"
            )
    return frozenset(keys)


def _keys_of(section: str) -> set[str]:
    """The keys of a section, whatever its key ``name`` is."""
    types: list[Any] = [RunConfig.model_fields[section].annotation]
    if (section,) in NAMED:
        names, class_of = NAMED[section,]
        types += [class_of(name).options for name in names]
    return {key for one in types for key in getattr(one, "model_fields", ())}


def is_finished(directory: RunDirectory, config: RunConfig, allow: frozenset[str]) -> bool:
    """Whether the run has no steps left; refuses a run with another configuration. Changes nothing."""
    # By one rename: of two processes that start the same new run at once, the slower one compares with the faster
    # one's.
    if directory.create(config):
        return False
    directory.changes(config, allow)
    return directory.is_finished(config)


def num_processes(config: RunConfig, wanted: int | None) -> int:
    """Ranks on this machine: ``wanted``, or one per GPU, or one. Raises UserError for too few GPUs."""
    gpus = num_gpus(config)
    if config.train.device == "cuda" and gpus == 0:
        raise UserError('train.device = "cuda", but torch sees no GPU; use "auto" or "cpu"')
    processes = wanted if wanted is not None else max(1, gpus)
    if processes < 1:
        raise UserError(f"--processes {processes}: must be at least 1")
    if gpus and processes > gpus:
        raise UserError(
            f"--processes {processes}: this machine has {gpus} GPUs, and each process needs one; use at most {gpus}"
        )
    return processes


def num_gpus(config: RunConfig) -> int:
    """Number of GPUs on this machine for the run."""
    return 0 if config.train.device == "cpu" else _num_gpus()


def _num_gpus() -> int:
    """GPUs that torch sees on this machine. Without a driver torch is not imported to say that there are none."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    # It asks the driver without creating a context: the GPUs are for the ranks.
    return int(importlib.import_module("torch").cuda.device_count())


def check_run(config: RunConfig, num_ranks: int, directory: RunDirectory, allow: Collection[str] = ()) -> None:
    """Refuse a configuration that cannot run on `num_ranks` ranks in `directory`, or has missing data."""
    # The quickest first: reading the store may take seconds on a network file system.
    check_divides(config, num_ranks)
    check_inputs(config, directory, allow)


def check_divides(config: RunConfig, num_ranks: int) -> Layout:
    """The layout on `num_ranks` ranks. Raises UserError with a valid layout if the configured one does not divide."""
    try:
        return check_layout(config, num_ranks)
    except LayoutError as error:
        # By name, because only a run that is refused needs the planner.
        raise importlib.import_module("lightscale.planning.advice").with_advice(error, config, num_ranks) from None


def check_inputs(config: RunConfig, directory: RunDirectory, allow: Collection[str] = ()) -> None:
    """Refuse configurations impossible on any number of ranks: mixers' shapes, groups, unfit data or initial weights.

    ``allow``: changes that a branch may have.
    """
    check_mixers(config.model, config.parallel)
    check_installed(config.metrics.sinks)
    optimizer_spec(config)
    check_measured_logits(config)
    check_lines(config)
    _check_store(config)
    _check_tasks(config)
    check_beginning(config, directory)
    check_base(config)
    check_reference(config, directory, allow)
    check_branch(config, directory, allow)
    check_teacher(config)


def check_trained_on(config: RunConfig, fingerprint: str) -> None:
    """Refuse stores with other data than a finished run was trained on; it needs them no more, so they may be gone."""
    paths = config.data.store_paths
    if not all(path.exists() for path in paths.values()):
        return
    now = open_stores(config.data).fingerprint()
    if now != fingerprint:
        named = " and ".join(f"{key} = {path}" for key, path in paths.items())
        raise UserError(
            f"{named}: other data than the finished run was trained on (fingerprint {fingerprint} then, {now} now); "
            "restore it, or train in another directory"
        )


def _check_tasks(config: RunConfig) -> None:
    """Refuse tasks of ``[evaluation]`` that are not there, or whose data is not, as `lightscale evaluate` would."""
    if not config.evaluation.every_steps:
        return
    tokenizer = load_tokenizer(next(iter(config.data.store_paths.values())))
    try:
        for task in find_tasks(config.evaluation.tasks, config.evaluation.data, limit=config.evaluation.limit):
            task.check(tokenizer)
    except UserError as error:
        raise WrongUse(f"[evaluation]: {error}") from None


def _check_store(config: RunConfig) -> None:
    """Refuse a store that is missing, damaged, lacks a named source, has two chat templates, or does not fit."""
    data = config.data
    store = open_stores(data)
    named = " and ".join(f"{key} = {path}" for key, path in data.store_paths.items())
    # Ranks open the shards that they read, when they read them; what is cut short would come to light in the middle.
    store.check_sizes()
    tokenizer = store.tokenizer
    is_of_images = config.model.patches is not None
    if store.image_shape is not None and not is_of_images:
        raise UserError(
            f'{named} has images, but task.name = "{config.task.name}" reads texts; use task.name = "classify-image"'
        )
    # An id without an embedding would fail on the device, far from its cause.
    if not is_of_images and tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size = {config.model.vocab_size} is less than the {tokenizer.vocab_size} tokens of "
            f"{tokenizer.name} in {named}; use at least {tokenizer.vocab_size}"
        )
    for name in data.sources:
        _check_source(f"data.sources.{name}", name, store)
    task = task_of(config)
    # Without names all that hold no validation data are trained on.
    training = [name for name, source in store.sources.items() if source.split == "train"]
    task.check_store(config.model, store, data.sources or training)
    if task.keeps_documents_whole and not task.compares_answers:
        for name in data.sources or training:
            _check_lengths(config, store.source(name))
    if task.writes_text:
        template_of(store, data.sources)
    _check_grid(config.model, store, data.sources or training)
    for name, validation in data.validation.items():
        other = store if validation.store is None else TokenStore(validation.store)
        if other is not store:
            other.check_sizes()
        _check_source(f"data.validation.{name}.source", validation.source, other)
        # Losses per token of two tokenizers cannot be compared.
        if other.tokenizer.sha256 != tokenizer.sha256:
            raise UserError(
                f"data.validation.{name}.store = {validation.store} was written with another tokenizer "
                f"({_describe(other.tokenizer)}) than {named} ({_describe(tokenizer)}); "
                "prepare both with the same tokenizer"
            )
        task.check_store(config.model, other, [validation.source])
        if task.keeps_documents_whole and not task.compares_answers:
            _check_lengths(config, other.source(validation.source))
        # In training data the loader finds it before the first step. Losses and labels of pairs need whole ones.
        source = other.source(validation.source)
        longest = source.longest_pair() if source.holds_pairs and (task.compares_answers or task.predicts_labels) else 0
        if fault := source.pair_fault(longest, data.sequence_length):
            raise UserError(f"data.validation.{name}.source = {validation.source}: {fault}")
        for number, (one, two) in enumerate(zip(task.class_names(store), task.class_names(other), strict=False)):
            if one != two:
                raise UserError(
                    f"data.validation.{name}.store = {validation.store}: label {number} is the class {two}, and {one} "
                    f"in {named}; {same_classes(other)}"
                )
        _check_grid(config.model, other, [validation.source])


def _check_lengths(config: RunConfig, source: TokenSource) -> None:
    """UserError for a document that no sequence holds whole, also of the shortest curriculum stage."""
    data = config.data
    length = min([data.sequence_length, *(stage.sequence_length for stage in data.curriculum)])
    number, longest = source.longest_document()
    if longest > length:
        origin = source.origin(number)
        place = f"document {number}" if origin is None else f"document {number} ({origin.file}, {origin.place})"
        key = "data.sequence_length" if length == data.sequence_length else "data.curriculum: sequence_length"
        raise UserError(
            f"{source.directory}: {place} has {longest:,} tokens, more than {key} = {length:,}, and task.name = "
            f'"{config.task.name}" learns from whole ones; use {longest} or more, or prepare the source with '
            f'chat.max_tokens = {length} (chat.too_long = "cut" cuts longer ones)'
        )


def check_lines(config: RunConfig) -> None:
    """UserError for sequence ranks whose segments end inside the slices of a grid, where TPE scans along axes."""
    grid, ranks = config.model.grid, config.parallel.sequence
    if grid is None or grid.axes == 1 or ranks == 1 or TPESpec not in shared_specs(config.model):
        return
    stride = grid.strides[0]
    for length in (config.data.sequence_length, *(stage.sequence_length for stage in config.data.curriculum)):
        if length % (ranks * stride):
            raise UserError(
                f"parallel.sequence = {ranks} cuts sequences of {length} tokens into segments that are no multiples of "
                f"the {stride} tokens between neighbours along axis 0 of model.grid.shape = {grid.shape}, which TPE "
                f"needs; use sequences of {near_multiple(length, ranks * stride)} tokens, parallel.sequence = 1, or a "
                "mixer without TPE"
            )


def _check_grid(model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
    """Refuse documents that are not grids of the model's shape; reads the ends of all."""
    if model.grid is None or model.patches is not None:
        return
    tokens = model.grid.document_tokens
    for source in map(store.source, sources):
        for first in range(0, source.num_documents, _DOCUMENTS_AT_ONCE):
            ends = source.document_ends(first, min(first + _DOCUMENTS_AT_ONCE, source.num_documents))
            expected = tokens * np.arange(first + 1, first + 1 + len(ends))
            wrong = np.flatnonzero(ends != expected)
            if len(wrong):
                number = first + int(wrong[0])
                length = int(ends[wrong[0]]) - tokens * number
                raise UserError(
                    f"{store.path}, source {source.name}: document {number} has {length} tokens, but model.grid has "
                    f"{tokens} (leading_tokens = {model.grid.leading_tokens}, shape = {model.grid.shape}); use a store "
                    "of such documents, or remove the table"
                )


def _check_source(key: str, name: str, store: TokenStore) -> None:
    if name not in store.sources:
        raise UserError(f"{key}: no source {name!r} in {store.title}; it has {', '.join(store.sources)}")


def _describe(tokenizer: TokenizerIdentity) -> str:
    return f"{tokenizer.name}, {tokenizer.vocab_size} tokens, {tokenizer.sha256[:8]}"
