"""Where a run goes on: from its newest good checkpoint, or from one before steps that had to be left out."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.curriculum import SkippedRanges
from lightscale.data_pipeline.loading.loader import TokenLoader
from lightscale.data_pipeline.loading.samples import SKIP_EVENT, recorded_skips
from lightscale.errors import UserError
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.engine import Engine
from lightscale.runs.journal import Journal
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.training.build import start_again
from lightscale.training.checkpoints.directories import directory_name, list_steps
from lightscale.training.checkpoints.manifest import NAME as MANIFEST
from lightscale.training.checkpoints.manifest import hash_file
from lightscale.training.checkpoints.restore import Checkpoints, Restored
from lightscale.training.health.guard import Guard


class Stateful(Protocol):
    """A part of a run that changes while it trains, the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, as JSON gives them back."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such values."""


class Recovery:
    """Resumes a run and takes it back; every method is collective over the ranks of ``engine``.

    Args:
        loader, guard: what is set back, beside the engine.
        state: all parts that a checkpoint has, by name; ``loader`` and ``guard`` are among them.
        allow: changes that a resumed run may have: ``data``, and those of ``Checkpoints.restore``.
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
    ) -> None:
        self._config, self._directory, self._journal = config, directory, journal
        self._engine, self._loader, self._guard, self._state, self._allow = engine, loader, guard, state, allow
        self._checkpoints = Checkpoints(directory.checkpoints, engine.mesh)
        self._ranks = Agreement(engine.mesh.control)

    def resume(self) -> int:
        """Take over the newest whole checkpoint, or the weights of ``train.init_from``; returns the steps done."""
        restored = self._checkpoints.restore(self._engine, allow=self._allow)
        if restored is None:
            self._start_from_weights()
        else:
            self._take_over(restored)
        jumps = Counter(self._recorded_skips()) - Counter(self._loader.skips.records)
        for at_tokens, skip_tokens in jumps.elements():
            # Recorded after the checkpoint was written.
            self._loader.skip(at_tokens, skip_tokens)
        return 0 if restored is None else restored.step

    def roll_back(self, last: int) -> int:
        """Go back to the last checkpoint before the steps left out in a row, and jump over all data since then.

        A crash after any of the three parts leaves what leads to the same run: with the newer checkpoints alone gone
        the same steps are left out again; with the jump recorded, every start finds the checkpoint and jumps.

        Args:
            last: the step just left out.

        Returns:
            The steps done. Checkpoints after it have been put aside: others will take their names.
        """
        first = last - self._guard.skips_in_a_row + 1
        steps: list[int] = self._ranks.on_first(lambda: list_steps(self._checkpoints.directory))
        target = max((step for step in steps if step < first), default=0)
        self._check_rollbacks(first, last, target)
        later = [self._checkpoints.directory / directory_name(step) for step in steps if step >= first]
        self._checkpoints.put_aside(later)

        loader, journal = self._loader, self._journal
        at_tokens = target * loader.tokens_per_step
        skip_tokens = loader.tokens - at_tokens
        journal.event(SKIP_EVENT, at_tokens=at_tokens, skip_tokens=skip_tokens, first_step=target + 1, last_step=last)
        journal.begin_attempt("rollback", step=target, put_aside=[path.name for path in later])
        journal.say(
            f"steps {first} to {last} were left out; going back to step {target}, and jumping over its next data"
        )

        if target == 0:
            start_again(self._engine, self._config.train.seed)
            loader.tokens, loader.skips = 0, SkippedRanges()
            self._guard.load_state_dict(Guard(self._config.guard).state_dict())
        return self.resume()

    def _check_rollbacks(self, first: int, last: int, target: int) -> None:
        done, limit = len(self._recorded_skips()), self._config.guard.max_rollbacks
        if done < limit:
            return
        run = self._directory.path
        hint = f' in a new run with train.init_from = "{run}@{target}"' if target else ""
        raise UserError(
            f"the steps {first} to {last} had to be left out, and the run went back {done} times already "
            f"(guard.max_rollbacks = {limit}); events.jsonl has the reasons. Look at the data of these steps "
            f"(lightscale data samples {run} --step {first}); a lower optimizer.lr or longer "
            f"optimizer.warmup_steps{hint} may help"
        )

    def _recorded_skips(self) -> list[tuple[int, int]]:
        """The jumps over data so far: one for every time that the run went back."""
        return self._ranks.on_first(lambda: recorded_skips(self._directory.path))

    def _take_over(self, restored: Restored) -> None:
        if "data" in self._allow:
            self._accept_data(restored)
        for name, part in self._state.items():
            part.load_state_dict(restored.common[name])
        if restored.changes:
            self._journal.event("versions_changed", step=restored.step, changes=restored.changes)
        # From here on the run is without them: they must not count among the checkpoints to keep.
        self._checkpoints.put_aside(restored.damaged)
        for reason in restored.refused:
            self._journal.say(f"passed over a damaged checkpoint, renamed .bad: {reason}")
        self._journal.event("resume", step=restored.step, checkpoint=restored.path.name, refused=restored.refused)
        self._journal.say(f"resuming after step {restored.step} from {restored.path}")

    def _accept_data(self, restored: Restored) -> None:
        """Go on at the same number of tokens in other data; what differs is recorded."""
        saved, current = restored.common["data"]["fingerprint"], self._loader.fingerprint()
        changes = {key: [saved.get(key), now] for key, now in current.items() if saved.get(key) != now}
        if changes:
            self._journal.event("data_changed", step=restored.step, changes=changes)
            restored.common["data"]["fingerprint"] = current

    def _start_from_weights(self) -> None:
        if self._config.train.init_from is None:
            return
        name, _, step = self._config.train.init_from.rpartition("@")
        source = Checkpoints(RunDirectory(name).checkpoints, self._engine.mesh)
        try:
            restored = source.restore(self._engine, step=int(step), weights_only=True)
        except UserError as error:
            raise UserError(f'train.init_from = "{self._config.train.init_from}": {error}') from None
        assert restored is not None, "a checkpoint that is not there is an error"
        self._check_tokenizer(restored)
        self._check_same_start(restored)
        self._journal.say(f"starting from the weights of {restored.path}")

    def _check_tokenizer(self, restored: Restored) -> None:
        """The rows of the embedding mean tokens of the tokenizer that they were trained with."""
        store = self._loader.store
        trained, now = restored.common["data"]["fingerprint"]["tokenizer"], store.tokenizer
        if trained != now.sha256:
            raise UserError(
                f"{restored.path} was trained with another tokenizer (sha256 {trained[:16]}…) than that of "
                f"{store.path} ({now.name}, sha256 {now.sha256[:16]}…); prepare the store with the former"
            )

    def _check_same_start(self, restored: Restored) -> None:
        """A run may begin several times, and must from the same weights."""
        manifest = self._ranks.on_first(lambda: hash_file(restored.path / MANIFEST).xxh3_128)
        events = self._ranks.on_first(lambda: read_lines(self._directory.events))
        if any(event["manifest"] != manifest for event in events if event["event"] == "init_from"):
            raise UserError(
                f'train.init_from = "{self._config.train.init_from}": {restored.path} is another checkpoint than the '
                f"one that {self._directory.path} began with; start a new run with --run"
            )
        self._journal.event("init_from", checkpoint=str(restored.path), manifest=manifest)
