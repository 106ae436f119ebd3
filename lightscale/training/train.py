"""The training loop, from top to bottom: configuration, mesh, data, model and engine, resume, steps, end.

    train                     one rank's attempt: stop signals, mesh, lock of the run, then
    Trainer.__init__          checks, data, engine, resume
    Trainer.run               loop { step, rollback?, validation?, evaluation?, save?, stop? }
    Trainer._train_step       data, forward and backward, guard, optimizer, metrics

Every rank runs the same code. The run directory always records the progress: metrics for each step, an event for each
start, save and stop, and a status when the loop ends.
"""

import importlib
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from lightscale.config.schedules.registry import learning_rate
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.chat.recorded import template_of
from lightscale.data_pipeline.loading.curriculum import LengthStage
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader, validation_batches
from lightscale.data_pipeline.loading.packing import INDEX_DIR
from lightscale.data_pipeline.loading.prefetch import Prefetcher
from lightscale.data_pipeline.loading.windows import Batch
from lightscale.data_pipeline.store.format import REFERENCE
from lightscale.data_pipeline.store.several_stores import open_stores
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.kernels.common.backends import fall_back
from lightscale.models.flops import training_flops_per_token
from lightscale.models.kernel_check import Mismatch, check_kernels
from lightscale.models.operators import describe_operators
from lightscale.models.registry import check_model
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.device.fused import describe_fused_kernels
from lightscale.parallel.device.settings import describe_device_settings
from lightscale.parallel.engine import Engine, LossSums
from lightscale.parallel.linear.fp8 import describe_fp8
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.runs.goodput import run_goodput
from lightscale.runs.held_directory import DirectoryReplaced
from lightscale.runs.journal import Journal
from lightscale.runs.metrics.logger import MetricsLogger, ValidationLoss
from lightscale.runs.metrics.peak_flops import device_peak_flops
from lightscale.runs.metrics.registry import open_sinks
from lightscale.runs.metrics.sink import COMMAND_VARIABLE, RunFacts, Sink
from lightscale.runs.run_directory import RunDirectory, Status, digest, end_text
from lightscale.runs.teacher import asked_model, computed_models
from lightscale.tasks.interface import task_of
from lightscale.tasks.preference import PreferenceConfig
from lightscale.training.beginning import REFERENCE_KEY, reference_sources
from lightscale.training.build import build_engine, weight_dtype
from lightscale.training.checkpoints.directories import Contents
from lightscale.training.checkpoints.exports import export_options, wait_for_exports
from lightscale.training.checkpoints.random_states import seed_generators
from lightscale.training.checkpoints.save_policy import SavePolicy
from lightscale.training.distillation import build_teacher, record_sensitivities
from lightscale.training.evaluation import BeginEvaluation, InTraining
from lightscale.training.health.fault_injection import fault_point
from lightscale.training.health.gradients import GradientCheck
from lightscale.training.health.guard import Guard
from lightscale.training.health.heartbeat import STARTING, Heartbeat
from lightscale.training.health.replicas import ReplicaCheck, SilentCorruption
from lightscale.training.measurements.step import StepMeasurements
from lightscale.training.preference import PreferenceObjective, build_reference
from lightscale.training.preflight import check_before_training
from lightscale.training.profile import StepProfiler
from lightscale.training.recovery import Recovery, Stateful
from lightscale.training.reference_store import check_device
from lightscale.training.run_tokenizer import keep_classes, keep_template, keep_tokenizer
from lightscale.training.signals import StopSignal


def preload(config: RunConfig) -> None:
    """Import the modules that `train` loads late, for ranks that are forks of this process."""
    # The mixers are found by their names.
    check_model(config.model, config.parallel)
    # The first optimizer of a process imports it, to tell it that there is nothing to compile.
    importlib.import_module("torch._dynamo")


def train(
    config: RunConfig,
    run: RunDirectory,
    allow: Collection[str] = (),
    hold: Callable[[], AbstractContextManager[object]] = nullcontext,
    planned_memory_bytes: int | None = None,
    begin_evaluation: BeginEvaluation | None = None,
    store: dist.Store | None = None,
) -> Status:
    """Train until the last step or a stop signal; resume from the newest intact checkpoint of ``run``.

    Called on every rank, with torchrun's variables in the environment and an existing ``run``.

    Args:
        config: of the run.
        run: its directory.
        allow: permitted changes of a resumed run: ``data``, and those of ``Checkpoints.restore``.
        hold: locks the run for this job; rank 0 enters it as soon as the ranks have met.
        planned_memory_bytes: planned memory of this rank, shown beside the measured one.
        begin_evaluation: makes the evaluation that runs every ``evaluation.every_steps`` steps.
        store: the store in which the ranks have met; a single rank needs none.

    Returns:
        ``finished`` or ``resumable``, as written to status.json.

    Raises:
        UserError: the run needs attention. Other errors may pass when the run is restarted.
    """
    # Before stop signals wait: it imports the mixers, which takes long, and nothing has begun that could be saved.
    check_model(config.model, config.parallel)
    heartbeat = Heartbeat(config.restart.hang_timeout_s)
    parallel, environ = config.parallel, os.environ
    # First: a stop signal during the slow start must not kill the process, but end the run after its first step.
    with StopSignal(announce=environ["RANK"] == "0") as stop, ExitStack() as stack:
        # Not earlier: who sees a heartbeat may send a stop signal.
        heartbeat.beat(STARTING, step=0)
        mesh = stack.enter_context(
            start_mesh(
                tensor=parallel.tensor,
                pipeline=parallel.pipeline,
                sequence=parallel.sequence,
                device=config.train.device,
                rank=int(environ["RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                local_rank=int(environ["LOCAL_RANK"]),
                store=store,
                timeout_s=config.restart.collective_timeout_s,
                exchange=parallel.exchange,
                attention=parallel.attention,
                ranks_per_node=parallel.ranks_per_node or int(environ["LOCAL_WORLD_SIZE"]),
                virtual_stages=parallel.virtual_stages,
            )
        )

        def lock() -> None:
            stack.enter_context(hold())

        try:
            # Not before the ranks have met: rank 0's refusal would leave the others waiting for it at the rendezvous.
            Agreement(mesh.control).on_first(lock)
            trainer = Trainer(config, run, mesh, stop, heartbeat, allow, planned_memory_bytes, begin_evaluation)
            with trainer.save_policy.exports:
                return trainer.run()
        except Exception as error:
            # The launcher shows the first error of all ranks; this says whose it is.
            error.add_note(f"rank {mesh.rank} on {socket.gethostname()}, at {heartbeat.where}")
            raise


class Trainer:
    """One attempt at a run on one rank.

    The checkpoint holds the whole state that training changes and the next step depends on: weights, moments and
    counters of ``engine``, the random states of each rank, ``step``, and the entries of ``state``. Add new state to
    ``state``: ``tests/training/test_state.py`` compares a trainer with a restored one, attribute by attribute.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        mesh: Mesh,
        stop: StopSignal,
        heartbeat: Heartbeat,
        allow: Collection[str] = (),
        planned_memory_bytes: int | None = None,
        begin_evaluation: BeginEvaluation | None = None,
    ) -> None:
        self.config, self.directory, self.mesh, self.stop, self.heartbeat = config, run, mesh, stop, heartbeat
        self.is_main = mesh.rank == 0
        self.planned_memory_bytes = planned_memory_bytes
        # Curriculum stage, and tokens of the step; None until the first step.
        self.shape: tuple[LengthStage, int] | None = None
        if self.is_main:
            run.hold()
        self.journal = Journal(run, enabled=self.is_main)
        self.journal.begin_attempt(world_size=mesh.world_size, device=_device_name(mesh.device))
        # Before anything slow or large: a full disk or a wrong driver should be said within seconds.
        self._check_machines()
        self._open_data(allow)
        reference = self._build_engine()
        self.guard = Guard(config.guard)
        # After the engine, which may draw from them while it is built. A checkpoint of the same layout restores them.
        seed_generators(config.train.seed, mesh.rank)
        self.state: dict[str, Stateful] = {"data": self.loader, "guard": self.guard}
        self.replicas = ReplicaCheck(self.engine, every=config.guard.compare_replicas_every)
        self.gradient_check = GradientCheck(self.engine, every=config.guard.compare_gradients_every)
        self.save_policy = SavePolicy(
            config.checkpoint,
            run,
            self.journal,
            heartbeat,
            engine=self.engine,
            largest=self._largest,
            only_finite=config.guard.enabled,
            parent_steps=config.parent_steps,
            export_options=export_options(config),
        )
        self.recovery = Recovery(
            config,
            run,
            self.journal,
            engine=self.engine,
            loader=self.loader,
            guard=self.guard,
            state=self.state,
            allow=allow,
            reference=reference,
        )
        self.step = self.recovery.resume()
        self.replicas.begin(self.step)
        self.gradient_check.begin(self.step)
        # Memory of the copies, now: running out of it at the first save would cost the steps before.
        self.save_policy.saver.reserve(self.engine)
        in_training = InTraining(
            config=config,
            directory=run,
            engine=self.engine,
            store=self.store,
            journal=self.journal,
            heartbeat=heartbeat,
            should_stop=lambda: stop.should_stop(self._largest),
        )
        self.evaluation = None if begin_evaluation is None else begin_evaluation(in_training)
        self._describe()

    def _open_data(self, allow: Collection[str]) -> None:
        """The store, what the run keeps of it, and the loader."""
        config, run, mesh = self.config, self.directory, self.mesh
        self.layout = LoaderLayout(
            data_rank=mesh.data_rank,
            data_size=mesh.data,
            sequence_rank=mesh.sequence_rank,
            sequence_size=mesh.sequence,
        )
        self.store = open_stores(config.data)
        keep_tokenizer(run, self.store, self.journal, Agreement(mesh.control), allow)
        self.task = task_of(config)
        chat = template_of(self.store, config.data.sources) if self.task.writes_text else None
        keep_template(run, chat, self.journal, Agreement(mesh.control), allow)
        keep_classes(run, self.task.class_names(self.store), Agreement(mesh.control))
        # Sets from other stores have the same tokenizer.
        self.validation_targets = self.task.targets(self.store, validation=True)
        self.label_array = REFERENCE if config.stored_reference else None
        if config.stored_reference and REFERENCE_KEY not in allow:
            check_device(reference_sources(config), mesh.device.type)
        self.loader = TokenLoader.of(
            config,
            self.store,
            layout=self.layout,
            index_dir=run.path / INDEX_DIR,
            targets=self.task.targets(self.store, validation=False),
            label_array=self.label_array,
        )

    def _build_engine(self) -> Engine | None:
        """Model, objective and optimizer as of step 0; returns the frozen reference of preferences, if there is one."""
        config, mesh = self.config, self.mesh
        self.teacher = build_teacher(config, mesh, self.store, self.directory, self.journal)
        vocab_size = self.store.tokenizer.vocab_size
        reference = build_reference(config, mesh, vocab_size=vocab_size)
        objective = None
        if isinstance(config.task, PreferenceConfig):
            objective = PreferenceObjective(config.task, mesh, reference)
        self.engine = build_engine(
            config,
            mesh,
            vocab_size=vocab_size,
            trainable=True,
            num_sources=len(self.loader.mixture.names),
            teach=self.teacher,
            trained_mixers=None if self.teacher is None else self.teacher.trained_mixers,
            objective=objective,
        )
        if config.train.cuda_graphs == "auto":
            self.engine.capture_graphs(
                lambda reason: self.journal.say(f"this run has no CUDA graphs: {reason}"),
                # A graph would draw again what it drew when it was captured.
                against="adapters have dropout (adapter.lora_dropout)" if config.adapter.lora_dropout else None,
            )
        return reference

    def _check_machines(self) -> None:
        """Refuse to start where the run cannot work, and warn of what may fail later."""
        ranks, local_rank = Agreement(self.mesh.control), self.mesh.device.index or 0
        for line in check_before_training(self.config, self.directory, ranks, local_rank):
            self.journal.say(f"warning: {line}")
            self.journal.event("preflight_warning", reason=line)
        if self.mesh.device.type == "cuda" and self.config.train.kernels == "auto":
            self._check_kernels(ranks)

    def _check_kernels(self, ranks: Agreement) -> None:
        """Compute without Triton, on all ranks, what its kernels get wrong on any of them."""
        config, mesh = self.config, self.mesh
        tokens = config.data.sequence_length // mesh.sequence

        def wrong() -> list[Mismatch]:
            dtype = weight_dtype(config.train, mesh.device)
            return [
                one
                for model in computed_models(config)
                for one in check_kernels(model, dtype, mesh.device, tokens=tokens, tensor=mesh.tensor)
            ]

        for rank, found in enumerate(ranks.on_all(wrong)):
            for one in found:
                fall_back(one.operator)
                self.journal.say(
                    f"WARNING: the Triton kernel of {one} (rank {rank}); this run computes {one.operator} with "
                    "PyTorch operators, many times slower. `lightscale doctor CONFIG` repeats the check"
                )
                self.journal.event(
                    "kernel_mismatch", operator=one.operator, result=one.result, found=one.found, rank=rank
                )

    def run(self) -> Status:
        """Train from the current step to the last of this configuration."""
        config, last = self.config, self.config.last_step
        length, asked, peak = config.data.sequence_length, asked_model(config), self._peak_flops()
        flops = training_flops_per_token(config.model, length, teacher=asked, adapter=config.adapters)
        with (
            MetricsLogger(
                self._open_sinks(),
                enabled=self.is_main,
                attempt=self.directory.attempt,
                first_step=self.step + 1,
                total_steps=last,
                step_tokens=config.step_tokens,
                log_every=config.metrics.log_every,
                flops_per_token=flops,
                peak_flops=peak,
            ) as metrics,
            StepProfiler(config.train.profile_steps, self.directory.profile, self.mesh) as profiler,
            Prefetcher(self.loader, device=self.mesh.device) as ahead,
        ):
            # At the start, so that the goodput that a restart has cost is on the curve.
            self._log_goodput(metrics)
            # What a stop or a failure has left of the evaluation of the weights that were read.
            if not self._evaluate(metrics):
                return self._leave("resumable", f"stopped by {self.stop.reason}")
            while self.step < last:
                metrics.begin_step(self.loader.tokens)
                with profiler.step(self.step + 1):
                    self._train_step(ahead, metrics)
                if self.guard.skips_in_a_row >= config.guard.max_skips:
                    first = self.step - self.guard.skips_in_a_row + 1
                    self._roll_back(metrics, first, f"steps {first} to {self.step} were skipped")
                    continue
                # After a possible rollback and before a possible save: the loss of the weights that are saved.
                every = config.train.validate_every
                if every and (self.step % every == 0 or self.step == last):
                    with self.engine.read_weights():
                        self._validate(metrics)
                is_evaluated = self._evaluate(metrics)
                # From here to the end of the iteration ranks decide together, by all-reduces: a rank that saved
                # or left by itself would leave the others in a collective that never completes.
                self.heartbeat.beat("agreeing", step=self.step)
                self.save_policy.collect(self.step, metrics, self.loader.tokens)
                stopping = self.stop.should_stop(self._largest) and (self.step < last or not is_evaluated)
                leaving = stopping or self.step == last
                if contents := self.save_policy.contents_due(self.step, leaving=leaving):
                    self._save(metrics, contents, leaving=leaving)
                # A stopped run finds it out again when it is resumed, and goes back then.
                if self.save_policy.not_finite is not None and not stopping:
                    self._roll_back(metrics, self.step, self.save_policy.not_finite)
                    continue
                if leaving:
                    self._log_goodput(metrics)
                if stopping:
                    return self._leave("resumable", f"stopped by {self.stop.reason}")
        wait_for_exports(
            self.save_policy.exports,
            largest=self._largest,
            should_stop=lambda: self.stop.should_stop(self._largest),
            beat=lambda: self.heartbeat.beat("leaving", step=self.step),
        )
        return self._leave("finished", end_text(config))

    def _train_step(self, ahead: Prefetcher, metrics: MetricsLogger) -> None:
        fault_point("step:begin")
        step, total = self.step + 1, self.config.total_steps
        stage, tokens = self._next_shape()
        self.heartbeat.beat("reading data", step=step)
        batches = self._to_device(ahead.next_step())
        self.heartbeat.beat("forward and backward", step=step)
        measurements = StepMeasurements(self.config, self.engine, batches, step=step, is_due=metrics.due(step))
        sums = self._forward_backward(step, batches, measure_logits=measurements.of_logits)
        # Between backward pass and optimizer, the last moment at which all copies of a weight must still be equal.
        self.replicas.observe()
        if self.replicas.is_due(step):
            self._compare_replicas(step)
        lr = learning_rate(self.config.optimizer, step, total)
        self.heartbeat.beat("optimizer", step=step)
        # Loss and norm are the same numbers on every rank, so that all ranks skip or none. A skipped step changes no
        # weight and no moment; its data counts as used, so that the next step reads other samples.
        grad_norm = self.engine.gradient_norm()
        skipped = self.guard.judge(sums.mean, grad_norm) if sums.tokens else "its data has no label to predict"
        if skipped is None:
            fault_point("step:optimizer")
            measurements.before_update()
            self.engine.apply(lr)
            self.replicas.remember()
        self.step = step
        # Skipped steps are always recorded, also where only every n-th step is: they explain gaps in the curves.
        if skipped is not None or metrics.due(step):
            self._check_directory()
            single, groups = measurements.result(
                sums,
                grad_norm,
                is_skipped=skipped is not None,
                sequence_length=stage.sequence_length,
                tokens=tokens,
                sources=self.loader.mixture.names,
                planned_memory_bytes=self.planned_memory_bytes,
            )
            metrics.log_step(
                step,
                tokens=self.loader.tokens,
                loss=sums.mean,
                grad_norm=grad_norm,
                lr=lr,
                skipped=skipped,
                groups=groups,
                **single,
            )
        if skipped is not None:
            self.journal.say(f"step {step} is skipped: {skipped}")
            self.journal.note("step_skipped", step=step, reason=skipped, in_a_row=self.guard.skips_in_a_row)

    def _next_shape(self) -> tuple[LengthStage, int]:
        """Curriculum stage and tokens of the step that follows."""
        shape = self.loader.stage_after(self.loader.tokens), self.loader.step_tokens.of_next(self.loader.tokens)
        if shape != self.shape:
            self.shape = shape
            # Other shapes compile other kernels, and more micro-batches take longer: the watchdog must not judge this
            # step by the ones before.
            self.heartbeat.expect_other_steps()
        return shape

    def _check_directory(self) -> None:
        """Stop, on all ranks together, where the run's directory was removed or replaced."""
        # Before each record: rank 0, which writes it, would leave by itself, and the others wait for it.
        if self._largest(self.is_main and self.directory.is_replaced):
            self.directory.check_held()
            raise DirectoryReplaced(f"{self.directory.path} was removed or replaced (seen by rank 0)")

    def _forward_backward(self, step: int, batches: Sequence[Batch], *, measure_logits: bool) -> LossSums:
        with self._recording_corruption(step):
            try:
                return self.gradient_check.forward_backward(step, batches, measure_logits=measure_logits)
            except SilentCorruption:
                # Weights that have changed explain other gradients, and comparing them names one rank.
                self.replicas.observe()
                self.replicas.compare(step)
                raise

    def _compare_replicas(self, step: int) -> None:
        with self._recording_corruption(step):
            self.replicas.compare(step)

    @contextmanager
    def _recording_corruption(self, step: int) -> Iterator[None]:
        try:
            yield
        except SilentCorruption as error:
            self.journal.event("silent_corruption", step=step, since=error.since, ranks=error.ranks, hosts=error.hosts)
            # The first rank to fail ends the others, and rank 0 must have written the event by then.
            dist.barrier(group=self.mesh.control)
            raise

    def _roll_back(self, metrics: MetricsLogger, first: int, reason: str) -> None:
        """Return to a checkpoint before step `first`, and continue with other data than that until here."""
        # A save in flight would give its name to a checkpoint after the one returned to.
        if self.save_policy.saver.is_writing:
            self.save_policy.finish(self.step, metrics, self.loader.tokens)
        self.heartbeat.beat("rolling back", step=self.step)
        self.step = self.recovery.roll_back(first, self.step, reason)
        self.save_policy.not_finite = None
        self.save_policy.exports.go_back(self.step)
        # Checkpoints of these steps will be other ones.
        self.save_policy.saver.known_good.clear()
        self.replicas.begin(self.step)
        self.gradient_check.begin(self.step)
        metrics.go_back(self.step, attempt=self.directory.attempt)

    def _validate(self, metrics: MetricsLogger) -> None:
        """The loss on every validation set, with the weights as they are."""
        self.heartbeat.beat("validation", step=self.step)
        losses = {}
        for name, chosen in self.config.data.validation.items():
            store = self.store if chosen.store is None else TokenStore(chosen.store)
            found = validation_batches(
                store.source(chosen.source),
                sequence_length=self.config.data.sequence_length,
                num_sequences=chosen.sequences,
                micro_batch_size=self.config.train.micro_batch_size,
                layout=self.layout,
                targets=self.validation_targets,
                # A label is of a whole document; losses of tokens are measured on the text as it stands.
                whole_documents=self.task.keeps_documents_whole
                or (self.task.predicts_labels and self.config.data.packing == "whole"),
                padding_id=store.tokenizer.eot_id,
                label_array=self.label_array,
            )
            batches = self._to_device(list(found))
            # The passes of one set may take longer than a rank may be silent.
            advance = partial(self.heartbeat.beat, "validation", step=self.step)
            sums = self.engine.forward_only(batches, top=self.task.top, advance=advance)
            if not sums.tokens:
                self.journal.say(f"validation set {name}: no label to predict")
                continue
            by_position = tuple(loss / max(count, 1) for loss, count in sums.by_bucket)
            if self.teacher is not None and self.step == self.config.total_steps:
                record_sensitivities(
                    self.teacher, self.engine, batches, self.journal, self.heartbeat, name=name, step=self.step
                )
            accuracies = dict(zip(self.task.top, sums.accuracies, strict=True))
            losses[name] = ValidationLoss(loss=sums.mean, by_position=by_position, accuracies=accuracies)
        if losses:
            metrics.log_validation(self.step, tokens=self.loader.tokens, losses=losses)

    def _evaluate(self, metrics: MetricsLogger) -> bool:
        """Evaluate where it is due; False where a stop left a part of it, for when the run is resumed."""
        every = self.config.evaluation.every_steps
        if self.evaluation is None or not self.step or (self.step % every and self.step < self.config.total_steps):
            return True
        self.heartbeat.beat("evaluation", step=self.step)
        self._check_directory()
        with self.engine.read_weights():
            found = self.evaluation.evaluate(self.step)
        metrics.log_evaluation(self.step, tokens=self.loader.tokens, scores=found.scores, seconds=found.seconds)
        return found.is_complete

    def _save(self, metrics: MetricsLogger, contents: Sequence[Contents], *, leaving: bool) -> None:
        self._check_directory()
        if self.save_policy.skips(self.step, metrics, contents, leaving=leaving):
            return
        began = time.perf_counter()
        # Corrupted weights must not reach a checkpoint: a restart then goes back to before the corruption.
        self._compare_replicas(self.step)
        if self.config.guard.compare_gradients_every:
            self.heartbeat.beat("comparing gradients", step=self.step)
            with self._recording_corruption(self.step):
                self.gradient_check.check(self.step)
        self.save_policy.save(
            self.step,
            metrics,
            self.loader.tokens,
            state={name: part.state_dict() for name, part in self.state.items()},
            facts={"tokens": self.loader.tokens, "store": self.store.fingerprint()},
            about={
                "config": digest(self.config),
                "attempt": self.directory.attempt,
                "tokenizer": self.store.tokenizer.sha256,
                **({} if self.recovery.base is None else {"base": self.recovery.base.fact()}),
            },
            contents=contents,
            checks_s=time.perf_counter() - began,
            # While steps are being skipped, a rollback may need the last checkpoint before them.
            prune=not self.guard.skips_in_a_row,
            leaving=leaving,
        )

    def _log_goodput(self, metrics: MetricsLogger) -> None:
        """Goodput of the run since its first start, from all its records."""
        if self.is_main and self.step and (goodput := run_goodput(self.directory)) is not None:
            metrics.log_goodput(self.step, tokens=self.loader.tokens, goodput=goodput)

    def _leave(self, status: Status, reason: str) -> Status:
        self.heartbeat.beat("leaving", step=self.step)
        # No rank leaves before the status is on disk: the launcher reads it when the ranks are gone.
        if self.is_main:
            self.journal.event(status, step=self.step, reason=reason)
            self.directory.write_status(status, reason=reason, step=self.step, tokens=self.loader.tokens)
        dist.barrier(group=self.mesh.control)
        return status

    def _to_device(self, batches: Sequence[Batch]) -> list[Batch]:
        return [batch.to(self.mesh.device) for batch in batches]

    def _largest(self, value: int) -> int:
        """The largest ``value`` of all ranks, on all of them."""
        # On the CPU, by the control group: it must not queue behind the GPU's work.
        largest = torch.tensor(value)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.mesh.control)
        return int(largest)

    def _open_sinks(self) -> list[Sink]:
        if not self.is_main:
            return []
        command = os.environ.get(COMMAND_VARIABLE) or shlex.join(["lightscale", *sys.argv[1:]])
        facts = RunFacts(directory=self.directory.path, config=self.config, command=command, first_step=self.step + 1)
        return open_sinks(self.config.metrics.sinks, facts)

    def _peak_flops(self) -> float | None:
        name = _device_name(self.mesh.device)
        peak = device_peak_flops(name)
        if peak is None:
            is_cpu = self.mesh.device.type == "cpu"
            self.journal.say("MFU is not reported on CPUs" if is_cpu else f"MFU is not reported: unknown device {name}")
        return None if peak is None else peak * self.mesh.world_size

    def _describe(self) -> None:
        """Log what this run is: size, precision, ranks, operators, data."""
        mesh, config = self.mesh, self.config
        held = [parameter for chunk in self.engine.chunks for parameter in chunk.parameters()]
        parameters = sum(one.numel() for one in held)
        trained = sum(one.numel() for one in held if one.requires_grad)
        dtype = str(weight_dtype(config.train, mesh.device)).removeprefix("torch.")
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.axes.items())
        self.journal.say(
            f"{parameters:,} parameters on this rank, {dtype} on {_device_name(mesh.device)}; ranks: {axes}"
        )
        if trained < parameters:
            self.journal.say(f"adapters: {trained:,} of them are trained, {trained / parameters:.2%}")
        self.journal.say(describe_fused_kernels())
        if mesh.device.type == "cuda":
            self.journal.say(describe_device_settings(os.environ))
        self.journal.say(describe_operators(config.model, weight_dtype(config.train, mesh.device), mesh.device))
        if config.train.fp8 != "none":
            self.journal.say(describe_fp8(mesh.device))
        for line in self.loader.description():
            self.journal.say(line)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
