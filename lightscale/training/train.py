"""The training loop, top to bottom: configuration, mesh, data, model and engine, resume, steps, the end.

Every rank runs this. Whatever happens, the run directory says how far it got: metrics for each step, an event for
each start, save and stop, and a status when the loop ends.
"""

import os
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
import torch.distributed as dist

from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.curriculum import LengthStage
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader, validation_batches
from lightscale.data_pipeline.loading.packing import INDEX_DIR
from lightscale.data_pipeline.loading.prefetch import Prefetcher
from lightscale.data_pipeline.loading.windows import Batch
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.models.flops import training_flops_per_token
from lightscale.models.operators import describe_operators
from lightscale.models.registry import check_mixers
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.fused import describe_fused_kernels
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.runs.goodput import run_goodput
from lightscale.runs.journal import Journal
from lightscale.runs.metrics import MetricsLogger, ValidationLoss, device_peak_flops
from lightscale.runs.run_directory import RunDirectory, Status, digest
from lightscale.training.build import build_engine, weight_dtype
from lightscale.training.checkpoints.random_states import seed_generators
from lightscale.training.checkpoints.save_policy import Keeper
from lightscale.training.health.faults import reach
from lightscale.training.health.guard import Guard
from lightscale.training.health.heartbeat import Heartbeat
from lightscale.training.health.replicas import ReplicaCheck, SilentCorruption
from lightscale.training.preflight import check_before_training
from lightscale.training.profile import StepProfiler
from lightscale.training.recovery import Recovery, Stateful
from lightscale.training.schedule import learning_rate
from lightscale.training.signals import StopSignal


def train(
    config: RunConfig,
    run: RunDirectory,
    allow: Collection[str] = (),
    hold: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Status:
    """Train until the last step or a stop signal; resume from the newest whole checkpoint of ``run``.

    Called on every rank, with torchrun's variables in the environment and ``run`` already created. ``allow`` names the
    changes that a resumed run may have: ``data``, and those of ``Checkpoints.restore``. ``hold`` takes the run for
    this job, on rank 0, as soon as the ranks have met: so a refusal reaches all of them.

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
        ExitStack() as held,
    ):

        def take() -> None:
            held.enter_context(hold())

        try:
            Agreement(mesh.control).on_first(take)
            return Trainer(config, run, mesh, stop, heartbeat, allow).run()
        except Exception as error:
            error.add_note(f"rank {mesh.rank} on {socket.gethostname()}, at {heartbeat.where}")
            raise


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
        self.is_main = mesh.rank == 0
        self.stage: LengthStage | None = None
        self.journal = Journal(run, enabled=self.is_main)
        self.journal.begin_attempt(world_size=mesh.world_size, device=_device_name(mesh.device))
        self._check_machines()

        self.layout = LoaderLayout(
            data_rank=mesh.data_rank,
            data_size=mesh.data,
            sequence_rank=mesh.sequence_rank,
            sequence_size=mesh.sequence,
        )
        self.store = TokenStore(config.data.store)
        self.loader = TokenLoader.of(config, self.store, layout=self.layout, index_dir=run.path / INDEX_DIR)
        self.engine = build_engine(config, mesh, vocab_size=self.store.tokenizer.vocab_size, trainable=True)
        self.guard = Guard(config.guard)
        seed_generators(config.train.seed, mesh.rank)
        self.state: dict[str, Stateful] = {"data": self.loader, "guard": self.guard}
        self.replicas = ReplicaCheck(self.engine, every=config.guard.compare_replicas_every)
        self.keeper = Keeper(config.checkpoint, run, self.journal, heartbeat, engine=self.engine, largest=self._largest)
        self.recovery = Recovery(
            config,
            run,
            self.journal,
            engine=self.engine,
            loader=self.loader,
            guard=self.guard,
            state=self.state,
            allow=allow,
        )
        self.step = self.recovery.resume()
        self.replicas.begin(self.step)
        self.keeper.saver.reserve(self.engine)
        self._describe()

    def _check_machines(self) -> None:
        """Refuse to begin where it cannot go well, and say what may not."""
        ranks, local_rank = Agreement(self.mesh.control), self.mesh.device.index or 0
        for line in check_before_training(self.config, self.directory, ranks, local_rank):
            self.journal.say(f"warning: {line}")
            self.journal.event("preflight_warning", reason=line)

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
                    self._go_back(metrics)
                    continue
                every = config.train.validate_every
                if every and (self.step % every == 0 or self.step == total):
                    self._validate(metrics)
                self.heartbeat.beat("agreeing", step=self.step)
                self.keeper.collect(self.step, metrics, self.loader.tokens)
                stopping = self.stop.should_stop(self._largest) and self.step < total
                leaving = stopping or self.step == total
                if leaving or self.keeper.is_due(self.step):
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
            self.journal.say(f"step {step} is left out: {skipped}")
            in_a_row = self.guard.skips_in_a_row
            self.journal.note("step_skipped", step=step, reason=skipped, in_a_row=in_a_row)

    def _compare_replicas(self, step: int) -> None:
        try:
            self.replicas.compare(step)
        except SilentCorruption as error:
            self.journal.event("silent_corruption", step=step, since=error.since, ranks=error.ranks, hosts=error.hosts)
            # The first rank to fail ends the others, and the event must be there by then.
            dist.barrier(group=self.mesh.control)
            raise

    def _go_back(self, metrics: MetricsLogger) -> None:
        """To before the steps that were left out in a row, to other data than that."""
        if self.keeper.saver.is_writing:
            self.keeper.finish(self.step, metrics, self.loader.tokens)
        self.heartbeat.beat("going back", step=self.step)
        self.step = self.recovery.roll_back(self.step)
        self.keeper.saver.known_good.clear()
        self.replicas.begin(self.step)
        metrics.go_back(self.step, attempt=self.directory.attempt)

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

    def _save(self, metrics: MetricsLogger, *, leaving: bool) -> None:
        # So that a run that restarts is without whatever was computed from corrupted weights.
        self._compare_replicas(self.step)
        self.keeper.save(
            self.step,
            metrics,
            self.loader.tokens,
            state={name: part.state_dict() for name, part in self.state.items()},
            facts={"tokens": self.loader.tokens, "store": self.store.fingerprint()},
            about={"config": digest(self.config), "attempt": self.directory.attempt},
            # While steps are left out, the last checkpoint before them may still be needed, however many follow.
            prune=not self.guard.skips_in_a_row,
            leaving=leaving,
        )

    def _log_goodput(self, metrics: MetricsLogger) -> None:
        """How much of the time since the run's first start has counted; all its records are read."""
        if self.is_main and self.step and (goodput := run_goodput(self.directory)) is not None:
            metrics.log_goodput(self.step, tokens=self.loader.tokens, goodput=goodput)

    def _leave(self, status: Status, reason: str) -> Status:
        self.heartbeat.beat("leaving", step=self.step)
        if self.is_main:
            self.journal.event(status, step=self.step, reason=reason)
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
        self.journal.say(
            f"{parameters:,} parameters on this rank, {dtype} on {_device_name(mesh.device)}; ranks: {axes}"
        )
        self.journal.say(describe_fused_kernels())
        self.journal.say(describe_operators(config.model, weight_dtype(config.train, mesh.device), mesh.device))
        for line in self.loader.description():
            self.journal.say(line)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
