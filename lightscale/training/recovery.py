"""Recovery: a run continues from its newest good checkpoint, or from one before steps that had to be skipped.

    resume      at every start: newest intact checkpoint -> weights, optimizer, random states, data position, guard
    roll_back   after too many skipped steps in a row, or for a state that is not finite: put newer checkpoints aside,
                record that their data is skipped, and resume from the last checkpoint before them

Checkpoints and events on disk alone decide where a run continues. A crash at any moment therefore leads to the same run
as no crash.
"""

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from lightscale.config.model import ModelConfig
from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.curriculum import SkippedRanges
from lightscale.data_pipeline.loading.loader import TokenLoader
from lightscale.data_pipeline.loading.samples import (
    BRANCH_EVENT,
    ROLLBACK_EVENT,
    SKIP_EVENT,
    own_skips,
    recorded_skips,
)
from lightscale.errors import UserError
from lightscale.models.low_rank import begin_adapters
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.engine import Engine
from lightscale.records import Record
from lightscale.runs.journal import Journal
from lightscale.runs.run_directory import GAVE_UP_EVENT, RunDirectory, read_lines
from lightscale.training.base import Base, read_base
from lightscale.training.beginning import kept_weights
from lightscale.training.branch import lineage, parent_of
from lightscale.training.build import start_again
from lightscale.training.checkpoints.directories import CheckpointName, adopt, list_checkpoints, list_steps
from lightscale.training.checkpoints.manifest import NAME as MANIFEST
from lightscale.training.checkpoints.manifest import hash_file, read_manifest
from lightscale.training.checkpoints.reading import DamagedCheckpoint
from lightscale.training.checkpoints.restore import Checkpoints, LostCheckpoints, Restored
from lightscale.training.health.copies import check_copies
from lightscale.training.health.guard import Guard

GIVE_UP = "lost-checkpoints"
"""In ``--allow-change``: begin again at step 0 although the run's checkpoints are gone."""


_DECIDE_TOKENS = {"train.global_batch_size", "train.rampup_batch_size", "data.sequence_length"}


def recorded_checkpoints(events: Iterable[Record], lines: Iterable[Record]) -> dict[str, int]:
    """Name and step of the checkpoints that a run should have, by its events and its lines of metrics.

    A save is in both, and a resume is evidence too, so that no single damaged line makes a run forget its checkpoints.
    """
    saved: dict[str, int] = {}
    # Metrics do not say what was in a save, nor what became of it.
    not_full: set[int] = set()
    since_attempt = 0
    for event in events:
        match event["event"]:
            case "checkpoint":
                saved[event.get("checkpoint", CheckpointName(event["step"]).directory)] = event["step"]
                for step in event.get("removed", ()):
                    saved.pop(CheckpointName(step).directory, None)
            case "resume" if "checkpoint" in event:
                saved[event["checkpoint"]] = event["step"]
            case "weights":
                not_full.add(event["step"])
            case "checkpoints_given_up":
                saved.clear()
                since_attempt = event["attempt"]
            case "rollback" if event["step"] == 0:
                saved.clear()
                since_attempt = event["attempt"]
        for name in event.get("put_aside", ()):
            saved.pop(name, None)
    steps = (
        line["checkpoint_step"] for line in lines if "checkpoint_step" in line and line["attempt"] >= since_attempt
    )
    if not saved and (newest := max((step for step in steps if step not in not_full), default=0)):
        saved[CheckpointName(newest).directory] = newest
    return saved


def _has_own_embedding_std(model: ModelConfig) -> bool:
    """Whether an output layer that is a copy of the embedding could be drawn otherwise than it."""
    return model.ties_weights and model.embedding_std not in (None, model.init_std)


class Stateful(Protocol):
    """A part of a run that changes while it trains, with the same state on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, as JSON gives them back."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such values."""


class Recovery:
    """Resumes a run and rolls it back; every method is collective over the ranks of ``engine``.

    Args:
        loader, guard: reset by a rollback to step 0, beside the engine.
        state: all parts that a checkpoint holds, by name; ``loader`` and ``guard`` are among them.
        allow: changes that a resumed run may have: ``data``, and those of ``Checkpoints.restore``.
        reference: frozen model to read from ``train.init_from``; None: that is ``engine``'s own, or there is none.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        journal: Journal,
        *,
        engine: Engine,
        loader: TokenLoader,
        guard: Guard,
        state: Mapping[str, Stateful],
        allow: Collection[str],
        reference: Engine | None = None,
    ) -> None:
        self._config, self._directory, self._journal = config, directory, journal
        self._engine, self._loader, self._guard, self._state, self._allow = engine, loader, guard, state, allow
        self._reference = reference
        self._ranks = Agreement(engine.mesh.control)
        self.base: Base | None = None
        """The frozen weights beside adapters or of a reference, read by ``resume``; None: the run has none."""
        self._checkpoints = Checkpoints(
            directory.checkpoints,
            engine.mesh,
            parts=list(state),
            step_tokens=self._step_tokens(),
            has_own_embedding_std=_has_own_embedding_std(config.model),
        )

    def _step_tokens(self) -> StepTokens | None:
        """Of all steps of the run; None where they changed, also of its parents, or where a parent is gone."""
        return self._config.step_tokens if self._ranks.on_first(self._keeps_step_tokens) else None

    def _keeps_step_tokens(self) -> bool:
        runs = lineage(self._config, self._directory)
        for config, directory in runs:
            events = read_lines(directory.events)
            changed = {key for event in events if event["event"] == "configuration_changed" for key in event["changes"]}
            if changed & _DECIDE_TOKENS or config.step_tokens != self._config.step_tokens:
                return False
        eldest, _ = runs[-1]
        return eldest.train.branch_from is None

    def resume(self) -> int:
        """Load the newest whole checkpoint, or that of ``train.branch_from``, or the weights of ``train.init_from``.

        Returns the steps done.
        """
        beside = self._read_base() if self._config.has_base else None
        restored = self._checkpoints.restore(self._engine, allow=self._allow)
        if restored is None:
            self._check_none_is_lost()
            restored = self._branch_off()
        if restored is not None:
            if self.base is not None:
                self.base.check(restored.path, restored.base)
            self._load(restored)
        elif beside is None or self._config.adapters is None:
            self._start_from_weights()
        else:
            begin_adapters(self._engine.chunks)
            self._engine.take_weights()
            self._journal.event("init_from", **beside)
            self._journal.say(f"training adapters beside the frozen weights of {beside['checkpoint']}")
            _, notes = self._ranks.on_first(lambda: kept_weights(self._config))
            for line in notes:
                self._journal.say(line)
        check_copies(self._engine)
        # A rollback records its skip after the checkpoint it returns to was written, so that this checkpoint does not
        # have it. Records are compared as multisets: data can be skipped twice at one position, by two rollbacks.
        missing = Counter(self._recorded_skips()) - Counter(self._loader.skips.records)
        for at_tokens, skip_tokens in missing.elements():
            self._loader.skip(at_tokens, skip_tokens)
        return 0 if restored is None else restored.step

    def _check_none_is_lost(self) -> None:
        """Refuse to begin again at step 0 where checkpoints were there, as after a file system was not mounted."""
        run = self._directory
        saved: dict[str, int] = self._ranks.on_first(
            lambda: recorded_checkpoints(read_lines(run.events), read_lines(run.metrics))
        )
        if not saved:
            return
        last = max(saved.values())
        if GIVE_UP not in self._allow:
            directory = self._checkpoints.directory
            kept: list[int] = self._ranks.on_first(lambda: list_steps(directory, "weights"))
            start = f', start a new run with train.init_from = "{self._directory.path}@{kept[-1]}"' if kept else ""
            there = f"only the weights of step {kept[-1]}" if kept else "none at all"
            raise LostCheckpoints(
                f"{directory} has no checkpoint to resume from, {there}, but the run saved {', '.join(saved)}. Check "
                f"whether a file system is not mounted. Restore them{start}, or start again at step 0 with "
                f"--allow-change {GIVE_UP}"
            )
        self._journal.event("checkpoints_given_up", step=last, checkpoints=list(saved))
        self._journal.say(f"starting again at step 0 without the checkpoints up to step {last}")

    def roll_back(self, first: int, last: int, reason: str) -> int:
        """Return to the last checkpoint before step `first`, and skip all data from there to step `last`.

        The order of the three parts matters. A crash after the first (newer checkpoints put aside) repeats the skipped
        steps and rolls back again; after the second (skip recorded) every start finds the checkpoint and applies the
        skip; the third (new attempt) only separates the records.

        Args:
            first: of the bad steps. Good steps in between would have ended their row.
            last: the step that was just done.
            reason: the fault, for messages.

        Returns:
            The steps done. Checkpoints after it have been put aside, since later ones will take their names.
        """
        names: list[CheckpointName] = self._ranks.on_first(lambda: list_checkpoints(self._checkpoints.directory))
        # A checkpoint within the row holds good weights too, but its guard has counted skips; without any checkpoint
        # the run begins again at step 0.
        full = (name.step for name in names if name.contents == "full" and name.step < first)
        target = max(full, default=self._config.parent_steps)
        self._check_rollbacks(reason, first, target)
        # With the weights alone of steps before the row, which the run will reach again with other data.
        later = [self._checkpoints.directory / name.directory for name in names if name.step > target]
        self._checkpoints.put_aside(later)

        # All data between the checkpoint and here, not only that of the skipped steps: which batch did the damage is
        # not known, and it may have been one before the first bad loss.
        loader, journal = self._loader, self._journal
        at_tokens = self._tokens_after(target, [name for name in names if name.step == target])
        end_tokens = loader.step_tokens.after(self._config.total_steps - last, loader.tokens)
        skip_tokens = loader.skips.length_back_to(at_tokens, loader.tokens, end_tokens)
        journal.event(SKIP_EVENT, at_tokens=at_tokens, skip_tokens=skip_tokens, first_step=target + 1, last_step=last)
        # The skip once more: one damaged line of the record must not bring its data back.
        skip = {"at_tokens": at_tokens, "skip_tokens": skip_tokens}
        journal.begin_attempt(ROLLBACK_EVENT, step=target, put_aside=[path.name for path in later], **skip)
        journal.say(f"{reason}; rolling back to step {target} and skipping the data since then")

        if target == 0:
            # ``resume`` will find no checkpoint to overwrite what training has changed.
            start_again(self._engine, self._config.train.seed)
            loader.tokens, loader.skips = 0, SkippedRanges()
            self._guard.load_state_dict(Guard(self._config.guard).state_dict())
        return self.resume()

    def _tokens_after(self, step: int, checkpoints: Sequence[CheckpointName]) -> int:
        """Tokens consumed after ``step``, which has ``checkpoints``: steps before may have had another batch."""

        def recorded() -> int:
            for name in checkpoints:
                # Of a damaged one ``resume`` says so, and goes further back.
                with contextlib.suppress(DamagedCheckpoint):
                    facts = read_manifest(self._checkpoints.directory / name.directory).facts
                    return int(facts.get("tokens", self._loader.step_tokens.after(step)))
            return self._loader.step_tokens.after(step)

        return self._ranks.on_first(recorded)

    def _check_rollbacks(self, reason: str, first: int, target: int) -> None:
        own: list[tuple[int, int]] = self._ranks.on_first(lambda: own_skips(self._directory.path))
        done, limit = len(own), self._config.guard.max_rollbacks
        # Of all attempts together: a restart must not reset the count, or a run with bad data would never end.
        if done < limit:
            return
        run = self._directory.path
        # For those who start many runs: this one failed by its numbers, not by its machine.
        self._journal.event(GAVE_UP_EVENT, step=target, reason=f"{reason}, after {done} rollbacks")
        hint = f' in a new run with train.init_from = "{run}@{target}"' if target else ""
        raise UserError(
            f"{reason}, after {done} rollbacks (guard.max_rollbacks = {limit}); events.jsonl has the reasons. Check "
            "the data of these steps "
            f"(lightscale data samples {run} --step {first}); a lower optimizer.lr or longer "
            f"optimizer.warmup_steps{hint} may help"
        )

    def _recorded_skips(self) -> list[tuple[int, int]]:
        """(position, length) in tokens of the data skipped so far: one for every rollback, also of the parent."""
        return self._ranks.on_first(lambda: recorded_skips(self._directory.path))

    def _load(self, restored: Restored) -> None:
        if "data" in self._allow:
            self._accept_data(restored)
        for name, part in self._state.items():
            part.load_state_dict(restored.common[name])
        if restored.changes:
            self._journal.event("versions_changed", step=restored.step, changes=restored.changes)
        # The run now continues without them: damaged checkpoints must not count among those to keep. Only renamed, as
        # what damaged them may be worth finding out.
        self._checkpoints.put_aside(restored.damaged)
        for reason in restored.refused:
            self._journal.say(f"skipped a damaged checkpoint, renamed to .bad: {reason}")
        self._journal.event("resume", step=restored.step, checkpoint=restored.path.name, refused=restored.refused)
        self._journal.say(f"resuming after step {restored.step} from {restored.path}")

    def _accept_data(self, restored: Restored) -> None:
        """Continue at the same number of tokens in other data; what differs is recorded."""
        saved, current = restored.common["data"]["fingerprint"], self._loader.fingerprint()
        # The loader compares fingerprints when it loads its state; here the difference was allowed by name.
        changes = {key: [saved.get(key), now] for key, now in current.items() if saved.get(key) != now}
        if changes:
            self._journal.event("data_changed", step=restored.step, changes=changes)
            restored.common["data"]["fingerprint"] = current

    def _branch_off(self) -> Restored | None:
        """The checkpoint of ``train.branch_from``, read and made the run's own first one; None: it is no branch."""
        parent = parent_of(self._config)
        if parent is None:
            return None
        run, step = parent
        source = Checkpoints(
            run.checkpoints,
            self._engine.mesh,
            parts=list(self._state),
            step_tokens=self._step_tokens(),
            has_own_embedding_std=_has_own_embedding_std(self._config.model),
        )
        try:
            restored = source.restore(self._engine, step=step, allow=self._allow)
        except UserError as error:
            raise type(error)(f'train.branch_from = "{self._config.train.branch_from}": {error}') from None
        assert restored is not None, "the checkpoint is missing"
        manifest = self._check_same_start(restored, BRANCH_EVENT, "branch_from")
        events = self._ranks.on_first(lambda: read_lines(self._directory.events))
        # Once: what the parent skips from now on is no part of a branch that has begun.
        if not any(event["event"] == BRANCH_EVENT for event in events):
            skips = self._ranks.on_first(lambda: recorded_skips(run.path))
            self._journal.event(BRANCH_EVENT, parent=str(run.path), step=step, manifest=manifest, skips=skips)
        self._journal.say(f"branching off {run.path} after step {step}")
        self._ranks.on_first(lambda: adopt(restored.path, self._directory.checkpoints))
        return restored

    def _read_base(self) -> dict[str, Any]:
        """Read the frozen weights; the record of them, which is that of the run's first start."""
        self.base, restored = read_base(self._config, self._reference or self._engine)
        self._check_tokenizer(restored)
        if self._config.train.init_from is not None:
            self._check_same_start(restored, "init_from", "init_from")
        return {"checkpoint": str(restored.path), "manifest": self.base.manifest}

    def _start_from_weights(self) -> None:
        if self._config.train.init_from is None:
            return
        name, _, step = self._config.train.init_from.rpartition("@")
        source = Checkpoints(RunDirectory(name).checkpoints, self._engine.mesh, parts=["data"])
        try:
            kept, lines = self._ranks.on_first(lambda: kept_weights(self._config))
            restored = source.restore(
                self._engine, step=int(step), weights_only=True, conversion=kept, allow=self._allow
            )
        except UserError as error:
            raise UserError(f'train.init_from = "{self._config.train.init_from}": {error}') from None
        assert restored is not None, "the checkpoint is missing"
        self._check_tokenizer(restored)
        manifest = self._check_same_start(restored, "init_from", "init_from")
        more = {} if kept is None else {"conversion": kept.table()}
        self._journal.event("init_from", checkpoint=str(restored.path), manifest=manifest, **more)
        self._journal.say(f"starting from the weights of {restored.path}")
        for line in lines:
            self._journal.say(line)

    def _check_tokenizer(self, restored: Restored) -> None:
        """Refuse another tokenizer: a row of the embedding stands for a token of the one it was trained with."""
        store = self._loader.store
        trained, now = restored.common["data"]["fingerprint"]["tokenizer"], store.tokenizer
        if trained != now.sha256:
            raise UserError(
                f"{restored.path} was trained with a different tokenizer (sha256 {trained[:16]}…) than {store.path} "
                f"({now.name}, sha256 {now.sha256[:16]}…); use a store "
                "prepared with the tokenizer of the checkpoint"
            )

    def _check_same_start(self, restored: Restored, begun: str, field: str) -> str:
        """A run that failed before its first checkpoint starts again, and must do so from the same state.

        Args:
            begun: the event of its first start.
            field: of ``train``, which names the checkpoint.

        Returns the hash that stands for the checkpoint.
        """
        # The manifest has the hashes of all files: its own hash stands for the whole checkpoint, wherever it lies.
        manifest: str = self._ranks.on_first(lambda: hash_file(restored.path / MANIFEST).xxh3_128)
        events = self._ranks.on_first(lambda: read_lines(self._directory.events))
        if any(event["manifest"] != manifest for event in events if event["event"] == begun):
            raise UserError(
                f'train.{field} = "{getattr(self._config.train, field)}": {restored.path} is not the checkpoint '
                f"that {self._directory.path} started from; start a new run with --run"
            )
        return manifest
