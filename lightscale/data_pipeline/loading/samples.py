"""The data of a step of a run: every document and token range, computed from the records of the run.

Nothing is logged while training: the order of the samples is a pure function of the run's configuration, its store,
and the data that recoveries skipped (the events ``data_skipped`` of its events.jsonl).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightscale.config.arguments import require_run
from lightscale.config.files import load
from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.images import Images
from lightscale.data_pipeline.loading.loader import StepSamples, TokenLoader
from lightscale.data_pipeline.loading.packing import INDEX_DIR
from lightscale.data_pipeline.loading.targets import Targets
from lightscale.data_pipeline.loading.windows import PADDING
from lightscale.data_pipeline.store.origins import Origin
from lightscale.data_pipeline.store.several_stores import open_stores
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.records import read_records, trained_stores

SKIP_EVENT = "data_skipped"
"""The event of a run's events.jsonl with ``at_tokens`` and ``skip_tokens`` of skipped data; see ``SkippedRanges``."""
ROLLBACK_EVENT = "rollback"
"""The event of the return that follows it, with the same two fields."""
BRANCH_EVENT = "branch"
"""The first event of a branch, with ``skips``: (at_tokens, skip_tokens) of the data that its parent had skipped."""


@dataclass(frozen=True, kw_only=True)
class DocumentRange:
    """Consecutive tokens of a document."""

    document: int
    """Index in its source."""
    start: int
    stop: int
    """The tokens start … stop - 1 of the document were inputs; token 0 is the end-of-text token before it."""
    origin: Origin | None
    """The file that the document came from; None: the store has no origins."""
    label: str | None
    """Its class; None where the store has none."""


@dataclass(frozen=True, kw_only=True)
class SampleContent:
    """The content of one sequence."""

    sample: int
    """Index in the order of its curriculum stage."""
    source: str
    epoch: int
    """How often the source was read through before."""
    window: int
    documents: tuple[DocumentRange, ...]
    padding_tokens: int


@dataclass(frozen=True, kw_only=True)
class StepContent:
    """The data that one step consumed."""

    step: int
    first_token: int
    """Tokens consumed before it."""
    num_tokens: int
    sequence_length: int
    samples: tuple[SampleContent, ...]


MakeTargets = Callable[[RunConfig, TokenStore], Targets | Images | None]


def run_loader(run: Path, *, targets: MakeTargets | None = None) -> tuple[RunConfig, TokenLoader]:
    """The configuration of the run in the directory ``run``, and its loader with the skipped data recorded there.

    ``targets``: makes the labels of batches; none: the next token.
    ``UserError`` where it is no run, or its store is another one than its checkpoints were trained on.
    """
    require_run(run)
    path = run / "config.toml"
    config = load(path)
    store = open_stores(config.data)
    # Another store at the same path would give an answer too, about tokens that the run never saw.
    for trained_on in trained_stores(run):
        if trained_on != store.fingerprint():
            raise UserError(
                f"{store.title}: not the training data of {run} (fingerprint {store.fingerprint()}, its checkpoints "
                f"have {trained_on}); set {' and '.join(config.data.store_paths)} in {path} to its path"
            )
    made = targets(config, store) if targets else None
    loader = TokenLoader.of(config, store, index_dir=run / INDEX_DIR, targets=made)
    for at_tokens, skip_tokens in recorded_skips(run):
        loader.skip(at_tokens, skip_tokens)
    return config, loader


def step_content(loader: TokenLoader, step: int, recorded: Mapping[int, int] | None = None) -> StepContent:
    """The data that step number ``step``, from 1, of a run consumes.

    ``recorded``: of ``recorded_tokens``, for a run whose batch may have changed on the way. ``UserError`` where it does
    not tell what the step consumed.
    """
    if step < 1:
        raise UserError(f"step {step}: steps are counted from 1")
    first_token, num_tokens = _tokens_of(step, loader.step_tokens, {0: 0, **(recorded or {})})
    return StepContent(
        step=step,
        first_token=first_token,
        num_tokens=num_tokens,
        sequence_length=loader.stage_after(first_token).sequence_length,
        samples=tuple(_contents(loader, loader.step_after(first_token, num_tokens))),
    )


def recorded_tokens(run: Path) -> dict[int, int]:
    """Tokens consumed after each step that metrics.jsonl has, of a branch also in its parent."""
    found: dict[int, int] = {}
    parent, _, begun = (load(run / "config.toml").train.branch_from or "").rpartition("@")
    if parent and (Path(parent) / "config.toml").exists():
        found = {step: tokens for step, tokens in recorded_tokens(Path(parent)).items() if step <= int(begun)}
    for line in read_records(run / "metrics.jsonl").lines:
        # The run has gone back: later steps are done again, perhaps with another batch.
        while found and next(reversed(found)) >= line["step"]:
            found.popitem()
        if "tokens" in line:
            found[line["step"]] = line["tokens"]
    return found


def _tokens_of(step: int, step_tokens: StepTokens, recorded: Mapping[int, int]) -> tuple[int, int]:
    """Tokens consumed before the step, and by it: ``step_tokens``, unless what is ``recorded`` contradicts it."""
    before = max(one for one in recorded if one < step)
    behind = min((one for one in recorded if one >= step), default=None)
    first = step_tokens.after(step - 1 - before, recorded[before])
    if behind is None or step_tokens.after(behind - before, recorded[before]) == recorded[behind]:
        return first, step_tokens.of_next(first)
    if behind - before > 1:
        raise UserError(
            f"step {step}: the batch of the run was another one then, and metrics.jsonl tells no step between {before} "
            f"and {behind} (metrics.log_every); use step {behind + 1} or a later one"
        )
    return recorded[before], recorded[behind] - recorded[before]


def recorded_skips(run: Path) -> list[tuple[int, int]]:
    """(at_tokens, skip_tokens) of the data that the run skips: as its parent did, and by its own rollbacks."""
    return inherited_skips(run) + own_skips(run)


def inherited_skips(run: Path) -> list[tuple[int, int]]:
    """(at_tokens, skip_tokens) of the data that the parent of a branch had skipped when the branch began."""
    branches = (event for event in read_records(run / "events.jsonl").lines if event["event"] == BRANCH_EVENT)
    return [(at_tokens, skip_tokens) for at_tokens, skip_tokens in next(branches, {"skips": ()})["skips"]]


def own_skips(run: Path) -> list[tuple[int, int]]:
    """(at_tokens, skip_tokens) of the data that the run's own rollbacks skipped.

    Every rollback records it twice, as ``SKIP_EVENT`` and with its own event: one damaged line loses none.
    """
    skips: list[tuple[int, int]] = []
    # Of the newest ``SKIP_EVENT``, until its rollback comes; without it where that event cannot be read.
    open_skip: tuple[int, int] | None = None
    for event in read_records(run / "events.jsonl").lines:
        if event["event"] not in (SKIP_EVENT, ROLLBACK_EVENT) or "at_tokens" not in event:
            continue
        skip = event["at_tokens"], event.get("skip_tokens", 0)
        if event["event"] == SKIP_EVENT:
            skips.append(skip)
            open_skip = skip
        else:
            if open_skip != skip:
                skips.append(skip)
            open_skip = None
    return skips


def _contents(loader: TokenLoader, step: StepSamples) -> Iterator[SampleContent]:
    length = step.stage.sequence_length
    for sample, location, ranges in zip(step.samples, step.locations, step.ranges, strict=True):
        source = loader.store.source(location.source)
        documents = []
        padding_tokens = 0
        ends = [*ranges.slots[1:].tolist(), length]
        for start, slot, end in zip(ranges.starts.tolist(), ranges.slots.tolist(), ends, strict=True):
            if start == PADDING:
                padding_tokens = end - slot
                continue
            document = source.document_at(start)
            # Tokens are numbered in the source; a document's own count starts at its end-of-text token.
            begin = start - source.document(document)[0]
            documents.append(
                DocumentRange(
                    document=document,
                    start=begin,
                    stop=begin + end - slot,
                    origin=source.origin(document),
                    label=loader.store.label(location.source, document),
                )
            )
        yield SampleContent(
            sample=sample,
            source=location.source,
            epoch=location.epoch,
            window=location.window,
            documents=tuple(documents),
            padding_tokens=padding_tokens,
        )
