"""The training loop, top to bottom: configuration, mesh, data, model and engine, resume, steps, the end.

Every rank runs this. Whatever happens, the run directory says how far it got: metrics for each step, an event for
each start, save and stop, and a status when the loop ends.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightscale.config import RunConfig
from lightscale.data_pipeline.curriculum import Skips, Stage
from lightscale.data_pipeline.loader import Layout, TokenLoader, validation_batches
from lightscale.data_pipeline.packing import INDEX_DIR
from lightscale.data_pipeline.prefetch import Prefetcher
from lightscale.data_pipeline.samples import SKIP_EVENT, recorded_skips
from lightscale.data_pipeline.store import TokenStore
from lightscale.data_pipeline.windows import Batch
from lightscale.errors import UserError
from lightscale.models.flops import training_flops_per_token
from lightscale.models.operators import describe_operators
from lightscale.models.registry import check_mixers
from lightscale.parallel.fused import describe_fused_kernels
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.training.agreement import Agreement
from lightscale.training.build import build_engine, start_again, weight_dtype
from lightscale.training.checkpoint import Checkpoints, Restored
from lightscale.training.checkpoint_files import Retention, directory_name, list_steps
from lightscale.training.faults import reach
from lightscale.training.goodput import run_goodput
from lightscale.training.guard import Guard
from lightscale.training.heartbeat import Heartbeat
from lightscale.training.interval import SaveInterval
from lightscale.training.manifest import NAME as MANIFEST
from lightscale.training.manifest import hash_file
from lightscale.training.metrics import MetricsLogger, ValidationLoss, device_peak_flops
from lightscale.training.profile import StepProfiler
from lightscale.training.replicas import ReplicaCheck, SilentCorruption
from lightscale.training.run_directory import RunDirectory, Status, digest, read_lines
from lightscale.training.saving import SaveError, Saver
from lightscale.training.schedule import learning_rate
from lightscale.training.signals import StopSignal


def train(config: RunConfig, run: RunDirectory, allow: Collection[str] = ()) -> Status:
    """Train until the last step or a stop signal; resume from the newest whole checkpoint of ``run``.

    Called on every rank, with torchrun's variables in the environment and ``run`` already created. ``allow`` names the
    changes that a resumed run may have: ``data``, and those of ``Checkpoints.restore``.

    Returns:
        ``finished`` or ``resumable``, as written to status.json. Errors are raised; what is UserError among them
        needs a person.
    """
    heartbeat = Heartbeat(config.restart.hang_timeout_s)
    heartbeat.beat("starting", step=0)
    check_mixers(config.model, config.parallel)
    parallel, place = config.parallel, os.environ
    with (
        StopSignal(announce=place["RANK"] == "0") as stop,
        start_mesh(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            sequence=parallel.sequence,
            device=config.train.device,
            rank=int(place["RANK"]),
            world_size=int(place["WORLD_SIZE"]),
            local_rank=int(place["LOCAL_RANK"]),
            timeout_s=config.restart.collective_timeout_s,
            exchange=parallel.exchange,
            ranks_per_node=parallel.ranks_per_node or int(place["LOCAL_WORLD_SIZE"]),
            virtual_stages=parallel.virtual_stages,
        ) as mesh,
    ):
        return Trainer(config, run, mesh, stop, heartbeat, allow).run()


class Stateful(Protocol):
    """A part of a run that changes while it trains, the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, as JSON gives them back."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such values."""


class Trainer:
    """One attempt at a run on one rank.

    Everything that training changes, and the next step depends on, is in the checkpoint: weights, moments and counters
    of ``engine``, the random states of each rank, ``step``, and what is named in ``state``. A test compares a trainer
    with one that was restored, attribute by attribute.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        mesh: Mesh,
        stop: StopSignal,
        heartbeat: Heartbeat,
        allow: Collection[str] = (),
    ) -> None:
        self.config, self.directory, self.mesh, self.stop, self.heartbeat = config, run, mesh, stop, heartbeat
        self.allow = allow
        self.is_main = mesh.rank == 0
        self.ranks = Agreement(mesh.control)
        self.stage: Stage | None = None
        if self.is_main:
            run.begin_attempt(world_size=mesh.world_size, device=_device_name(mesh.device))

        self.layout = Layout(
            data_rank=mesh.data_rank,
            data_size=mesh.data,
            sequence_rank=mesh.sequence_rank,
            sequence_size=mesh.sequence,
        )
        self.store = TokenStore(config.data.store)
        self.loader = TokenLoader.of(config, self.store, layout=self.layout, index_dir=run.path / INDEX_DIR)
        self.engine = build_engine(config, mesh, vocab_size=self.store.tokenizer.vocab_size, trainable=True)
        self.guard = Guard(config.guard)
        self.state: dict[str, Stateful] = {"data": self.loader, "guard": self.guard}
        self.replicas = ReplicaCheck(self.engine, every=config.guard.compare_replicas_every)
        self.checkpoints, self.saver = Checkpoints(run.checkpoints, mesh), Saver(run.checkpoints, mesh)
        saves = [event for event in read_lines(run.events) if event["event"] == "checkpoint"]
        self.interval = SaveInterval(
            mtbf_s=3600 * config.checkpoint.mtbf_hours,
            now_s=time.monotonic(),
            stalls_s=[event["stall_s"] for event in saves],
        )
        self.failed_saves = 0
        self.step = self._resume()
        self.saver.reserve(self.engine)
        self._describe()

    def run(self) -> Status:
        """From the current step to the last."""
        config, total = self.config, self.config.total_steps
        flops, peak = training_flops_per_token(config.model, config.data.sequence_length), self._peak_flops()
        with (
            MetricsLogger(
                self.directory.metrics,
                enabled=self.is_main,
                attempt=self.directory.attempt,
                first_step=self.step + 1,
                total_steps=total,
                tokens_per_step=config.tokens_per_step,
                log_every=config.metrics.log_every,
                tensorboard=self.directory.tensorboard if config.metrics.tensorboard else None,
                flops_per_token=flops,
                peak_flops=peak,
            ) as metrics,
            StepProfiler(config.train.profile_steps, self.directory.profile, self.mesh) as profiler,
            Prefetcher(self.loader) as ahead,
        ):
            self._log_goodput(metrics)
            while self.step < total:
                metrics.begin_step()
                with profiler.step(self.step + 1):
                    self._train_step(ahead, metrics)
                if self.guard.skips_in_a_row >= config.guard.max_skips:
                    if self.saver.is_writing:
                        self._finish_save(metrics)
                    self._roll_back()
                    metrics.go_back(self.step, attempt=self.directory.attempt)
                    continue
                every = config.train.validate_every
                if every and (self.step % every == 0 or self.step == total):
                    self._validate(metrics)
                self.heartbeat.beat("agreeing", step=self.step)
                if self.saver.is_writing and not self._largest(not self.saver.is_written):
                    self._finish_save(metrics)
                stopping = self.stop.should_stop(self._largest) and self.step < total
                leaving = stopping or self.step == total
                if leaving or self._is_save_due():
                    self._save(metrics, leaving=leaving)
                if leaving:
                    self._log_goodput(metrics)
                if stopping:
                    return self._leave("resumable", f"stopped by {self.stop.reason}")
        return self._leave("finished", f"all {total} steps are done")

    def _train_step(self, ahead: Prefetcher, metrics: MetricsLogger) -> None:
        reach("step:begin")
        step, total = self.step + 1, self.config.total_steps
        stage = self.loader.stage_after(self.loader.tokens)
        if stage != self.stage:
            self.stage = stage
            self.heartbeat.expect_other_steps()
        self.heartbeat.beat("reading data", step=step)
        batches = self._to_device(ahead.next_step())
        self.heartbeat.beat("forward and backward", step=step)
        sums = self.engine.forward_backward(batches)
        self.replicas.observe()
        if self.replicas.is_due(step):
            self._compare_replicas(step)
        lr = learning_rate(self.config.optimizer, step, total)
        # Both are the same numbers on every rank, so that all skip or none; weights are still those of the last step.
        self.heartbeat.beat("optimizer", step=step)
        grad_norm = self.engine.gradient_norm()
        skipped = self.guard.judge(sums.mean, grad_norm)
        if skipped is None:
            reach("step:optimizer")
            self.engine.apply(lr, grad_norm)
            self.replicas.remember()
        self.step = step
        if skipped is not None or metrics.due(step):
            more = {"sequence_length": stage.sequence_length} if self.config.data.curriculum else {}
            metrics.log_step(
                step,
                tokens=self.loader.tokens,
                loss=sums.mean,
                grad_norm=grad_norm,
                lr=lr,
                skipped=skipped,
                **more,
            )
        if skipped is not None:
            self._say(f"step {step} is left out: {skipped}")
            in_a_row = self.guard.skips_in_a_row
            self._event("step_skipped", step=step, reason=skipped, in_a_row=in_a_row)

    def _compare_replicas(self, step: int) -> None:
        try:
            self.replicas.compare(step)
        except SilentCorruption as error:
            self._event("silent_corruption", step=step, since=error.since, ranks=error.ranks, hosts=error.hosts)
            # The first rank to fail ends the others, and the event must be there by then.
            dist.barrier(group=self.mesh.control)
            raise

    def _roll_back(self) -> None:
        """Go back to the last checkpoint before the steps left out in a row, and jump over all data since then.

        A crash after any of the three parts leaves what leads to the same run: with the newer checkpoints alone gone
        the same steps are left out again; with the jump recorded, every start finds the checkpoint and jumps.
        """
        self.heartbeat.beat("going back", step=self.step)
        last, first = self.step, self.step - self.guard.skips_in_a_row + 1
        steps: list[int] = self.ranks.on_first(lambda: list_steps(self.checkpoints.directory))
        target = max((step for step in steps if step < first), default=0)
        self._check_rollbacks(first, target)
        later = [self.checkpoints.directory / directory_name(step) for step in steps if step >= first]
        self.checkpoints.put_aside(later)
        # Others will take their names.
        self.saver.known_good -= {step for step in steps if step >= first}

        at_tokens = target * self.loader.tokens_per_step
        skip_tokens = self.loader.tokens - at_tokens
        self._event(SKIP_EVENT, at_tokens=at_tokens, skip_tokens=skip_tokens, first_step=target + 1, last_step=last)
        if self.is_main:
            self.directory.begin_attempt("rollback", step=target, put_aside=[path.name for path in later])
        self._say(f"steps {first} to {last} were left out; going back to step {target}, and jumping over its next data")

        if target == 0:
            start_again(self.engine, self.config.train.seed)
            self.loader.tokens, self.loader.skips = 0, Skips()
            self.guard.load_state_dict(Guard(self.config.guard).state_dict())
        self.step = self._resume()

    def _check_rollbacks(self, first: int, target: int) -> None:
        done, limit = len(self._recorded_skips()), self.config.guard.max_rollbacks
        if done < limit:
            return
        run = self.directory.path
        hint = f' in a new run with train.init_from = "{run}@{target}"' if target else ""
        raise UserError(
            f"the steps {first} to {self.step} had to be left out, and the run went back {done} times already "
            f"(guard.max_rollbacks = {limit}); events.jsonl has the reasons. Look at the data of these steps "
            f"(lightscale data samples {run} --step {first}); a lower optimizer.lr or longer "
            f"optimizer.warmup_steps{hint} may help"
        )

    def _validate(self, metrics: MetricsLogger) -> None:
        """The loss on every validation set, with the weights as they are."""
        self.heartbeat.beat("validation", step=self.step)
        losses = {}
        for name, chosen in self.config.data.validation.items():
            store = self.store if chosen.store is None else TokenStore(chosen.store)
            batches = validation_batches(
                store.source(chosen.source),
                sequence_length=self.config.data.sequence_length,
                num_sequences=chosen.sequences,
                micro_batch_size=self.config.train.micro_batch_size,
                layout=self.layout,
            )
            sums = self.engine.forward_only(self._to_device(list(batches)))
            by_position = tuple(loss / max(count, 1) for loss, count in sums.by_bucket)
            losses[name] = ValidationLoss(loss=sums.mean, by_position=by_position)
        metrics.log_validation(self.step, tokens=self.loader.tokens, losses=losses)

    def _resume(self) -> int:
        """Take over the newest whole checkpoint, or the weights of ``train.init_from``; returns the steps done."""
        restored = self.checkpoints.restore(self.engine, allow=self.allow)
        if restored is None:
            self._start_from_weights()
        else:
            self._take_over(restored)
        for at_tokens, skip_tokens in (Counter(self._recorded_skips()) - Counter(self.loader.skips.records)).elements():
            # Recorded after the checkpoint was written.
            self.loader.skip(at_tokens, skip_tokens)
        step = 0 if restored is None else restored.step
        self.replicas.begin(step)
        return step

    def _take_over(self, restored: Restored) -> None:
        if "data" in self.allow:
            self._accept_data(restored)
        for name, part in self.state.items():
            part.load_state_dict(restored.common[name])
        if restored.changes:
            self._event("versions_changed", step=restored.step, changes=restored.changes)
        self.saver.known_good.add(restored.step)
        # From here on the run is without them: they must not count among the checkpoints to keep.
        self.checkpoints.put_aside(restored.damaged)
        for reason in restored.refused:
            self._say(f"passed over a damaged checkpoint, renamed .bad: {reason}")
        self._event("resume", step=restored.step, checkpoint=restored.path.name, refused=restored.refused)
        self._say(f"resuming after step {restored.step} from {restored.path}")

    def _accept_data(self, restored: Restored) -> None:
        """Go on at the same number of tokens in other data; what differs is recorded."""
        saved, current = restored.common["data"]["fingerprint"], self.loader.fingerprint()
        changes = {key: [saved.get(key), now] for key, now in current.items() if saved.get(key) != now}
        if changes:
            self._event("data_changed", step=restored.step, changes=changes)
            restored.common["data"]["fingerprint"] = current

    def _recorded_skips(self) -> list[tuple[int, int]]:
        """The jumps over data so far: one for every time that the run went back."""
        return self.ranks.on_first(lambda: recorded_skips(self.directory.path))

    def _start_from_weights(self) -> None:
        if self.config.train.init_from is None:
            return
        name, _, step = self.config.train.init_from.rpartition("@")
        source = Checkpoints(RunDirectory(name).checkpoints, self.mesh)
        try:
            restored = source.restore(self.engine, step=int(step), weights_only=True)
        except UserError as error:
            raise UserError(f'train.init_from = "{self.config.train.init_from}": {error}') from None
        assert restored is not None, "a checkpoint that is not there is an error"
        self._check_tokenizer(restored)
        self._check_same_start(restored)
        self._say(f"starting from the weights of {restored.path}")

    def _check_same_start(self, restored: Restored) -> None:
        """A run may begin several times, and must from the same weights."""
        manifest = self.ranks.on_first(lambda: hash_file(restored.path / MANIFEST).xxh3_128)
        events = self.ranks.on_first(lambda: read_lines(self.directory.events))
        if any(event["manifest"] != manifest for event in events if event["event"] == "init_from"):
            raise UserError(
                f'train.init_from = "{self.config.train.init_from}": {restored.path} is another checkpoint than the '
                f"one that {self.directory.path} began with; start a new run with --run"
            )
        self._event("init_from", checkpoint=str(restored.path), manifest=manifest)

    def _check_tokenizer(self, restored: Restored) -> None:
        """The rows of the embedding mean tokens of the tokenizer that they were trained with."""
        trained, now = restored.common["data"]["fingerprint"]["tokenizer"], self.store.tokenizer
        if trained != now.sha256:
            raise UserError(
                f"{restored.path} was trained with another tokenizer (sha256 {trained[:16]}…) than that of "
                f"{self.store.path} ({now.name}, sha256 {now.sha256[:16]}…); prepare the store with the former"
            )

    def _is_save_due(self) -> bool:
        every = self.config.checkpoint.every
        if every is not None:
            return self.step % every == 0
        # By the clock of one rank; while a save is being written none is due.
        return not self.saver.is_writing and bool(self._largest(self.is_main and self.interval.due(time.monotonic())))

    def _save(self, metrics: MetricsLogger, *, leaving: bool) -> None:
        """Begin a checkpoint of this step; ``leaving``: and end it, for it is the last one."""
        if self.saver.is_writing:
            if not leaving:
                # The disk is slower than saves are due.
                metrics.count_skipped_save(self.step)
                self._event("checkpoint_skipped", step=self.step, reason="the one before is being written")
                return
            self._finish_save(metrics)
        self.heartbeat.beat("saving", step=self.step)
        checkpoint = self.config.checkpoint
        # So that a run that restarts is without whatever was computed from corrupted weights.
        self._compare_replicas(self.step)
        # While steps are left out, the last checkpoint before them may still be needed, however many follow.
        retention = Retention(keep=checkpoint.keep, keep_every=checkpoint.keep_every)
        stall_s = self.saver.begin(
            self.engine,
            step=self.step,
            common={name: part.state_dict() for name, part in self.state.items()},
            facts={"tokens": self.loader.tokens, "store": self.store.fingerprint()},
            about={"config": digest(self.config), "attempt": self.directory.attempt},
            retention=None if self.guard.skips_in_a_row else retention,
        )
        if leaving or not checkpoint.asynchronous:
            stall_s = self._finish_save(metrics, leaving=leaving)
        self.interval.saved(time.monotonic(), stall_s)

    def _finish_save(self, metrics: MetricsLogger, *, leaving: bool = False) -> float:
        """Record how the save in flight ended; a failure does not stop the training until it comes too often.

        Returns the seconds that training has waited for the save, from its copy to now.
        """
        self.heartbeat.beat("saving", step=self.step)
        began = time.perf_counter()
        try:
            saved = self.saver.finish()
        except SaveError as error:
            self.failed_saves += 1
            self._event("checkpoint_failed", step=self.step, reason=str(error), in_a_row=self.failed_saves)
            if leaving or self.failed_saves >= self.config.checkpoint.max_failures:
                raise
            self._say(f"{error}; training goes on")
            return time.perf_counter() - began
        self.failed_saves = 0
        stall_s = saved.stall_s + time.perf_counter() - began
        costs: dict[str, Any] = {"stall_s": stall_s, "write_s": saved.write_s, "num_bytes": saved.num_bytes}
        metrics.log_save(self.step, tokens=self.loader.tokens, saved_step=saved.step, **costs)
        where = {"step": saved.step, "tokens": saved.facts["tokens"], "checkpoint": saved.path.name}
        self._event("checkpoint", **where, removed=saved.removed, **costs)
        if saved.problem is not None:
            self._say(saved.problem)
        return stall_s

    def _log_goodput(self, metrics: MetricsLogger) -> None:
        """How much of the time since the run's first start has counted; all its records are read."""
        if self.is_main and self.step and (goodput := run_goodput(self.directory)) is not None:
            metrics.log_goodput(self.step, tokens=self.loader.tokens, goodput=goodput)

    def _leave(self, status: Status, reason: str) -> Status:
        self.heartbeat.beat("leaving", step=self.step)
        if self.is_main:
            self.directory.event(status, step=self.step, reason=reason)
            self.directory.write_status(status, reason=reason, step=self.step, tokens=self.loader.tokens)
        dist.barrier(group=self.mesh.control)
        return status

    def _to_device(self, batches: Sequence[Batch]) -> list[Batch]:
        return [batch.to(self.mesh.device) for batch in batches]

    def _largest(self, value: int) -> int:
        largest = torch.tensor(value)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.mesh.control)
        return int(largest)

    def _peak_flops(self) -> float | None:
        peak = device_peak_flops(_device_name(self.mesh.device))
        return None if peak is None else peak * self.mesh.world_size

    def _describe(self) -> None:
        """What this run is, for the log."""
        mesh, config = self.mesh, self.config
        parameters = sum(parameter.numel() for chunk in self.engine.chunks for parameter in chunk.parameters())
        dtype = str(weight_dtype(config.train, mesh.device)).removeprefix("torch.")
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.axes.items())
        self._say(f"{parameters:,} parameters on this rank, {dtype} on {_device_name(mesh.device)}; ranks: {axes}")
        self._say(describe_fused_kernels())
        self._say(describe_operators(config.model, weight_dtype(config.train, mesh.device), mesh.device))
        for line in self.loader.description():
            self._say(line)

    def _event(self, event: str, **fields: Any) -> None:
        if self.is_main:
            self.directory.event(event, **fields)

    def _say(self, text: str) -> None:
        if self.is_main:
            print(text, file=sys.stderr, flush=True)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
