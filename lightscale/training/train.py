"""The training loop, top to bottom: configuration, mesh, data, model and engine, resume, steps, the end.

Every rank runs this. Whatever happens, the run directory says how far it got: metrics for each step, an event for
each start, save and stop, and a status when the loop ends.
"""

import math
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightscale.config import RunConfig
from lightscale.data_pipeline.loader import Layout, TokenLoader, validation_batches
from lightscale.data_pipeline.packing import INDEX_DIR
from lightscale.data_pipeline.prefetch import Prefetcher
from lightscale.data_pipeline.store import TokenStore
from lightscale.data_pipeline.windows import Batch
from lightscale.errors import UserError
from lightscale.models.flops import training_flops_per_token
from lightscale.models.operators import describe_operators
from lightscale.models.registry import check_mixers
from lightscale.parallel.fused import describe_fused_kernels
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.training.build import build_engine, weight_dtype
from lightscale.training.checkpoint import Checkpoints, Restored
from lightscale.training.faults import reach
from lightscale.training.metrics import MetricsLogger, ValidationLoss, device_peak_flops
from lightscale.training.profile import StepProfiler
from lightscale.training.run_directory import RunDirectory, Status
from lightscale.training.schedule import learning_rate
from lightscale.training.signals import StopSignal


def train(config: RunConfig, run: RunDirectory) -> Status:
    """Train until the last step or a stop signal; resume from the newest whole checkpoint of ``run``.

    Called on every rank, with torchrun's variables in the environment and ``run`` already created.

    Returns:
        ``finished`` or ``resumable``, as written to status.json. Errors are raised; what is UserError among them
        needs a person.
    """
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
            exchange=parallel.exchange,
            ranks_per_node=parallel.ranks_per_node or int(place["LOCAL_WORLD_SIZE"]),
            virtual_stages=parallel.virtual_stages,
        ) as mesh,
    ):
        return Trainer(config, run, mesh, stop).run()


class Trainer:
    """One attempt at a run on one rank."""

    def __init__(self, config: RunConfig, run: RunDirectory, mesh: Mesh, stop: StopSignal) -> None:
        self.config, self.directory, self.mesh, self.stop = config, run, mesh, stop
        self.is_main = mesh.rank == 0
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
        self.checkpoints = Checkpoints(run.checkpoints, mesh)
        self.step = self._resume()
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
            while self.step < total:
                metrics.begin_step()
                with profiler.step(self.step + 1):
                    self._train_step(ahead, metrics)
                every = config.train.validate_every
                if every and (self.step % every == 0 or self.step == total):
                    self._validate(metrics)
                stopping = self.stop.should_stop(self._largest) and self.step < total
                if stopping or self.step % (config.checkpoint.every or 100) == 0 or self.step == total:
                    self._save()
                if stopping:
                    return self._leave("resumable", f"stopped by {self.stop.reason}")
        return self._leave("finished", f"all {total} steps are done")

    def _train_step(self, ahead: Prefetcher, metrics: MetricsLogger) -> None:
        step, total = self.step + 1, self.config.total_steps
        reach("step:begin")
        stage = self.loader.stage_after(self.loader.tokens)
        batches = self._to_device(ahead.next_step())
        sums = self.engine.forward_backward(batches)
        lr = learning_rate(self.config.optimizer, step, total)
        # The loss is the same number on every rank, so that all stop or none; weights are still those of the last step.
        _require_finite("loss", sums.mean, step)
        reach("step:optimizer")
        grad_norm = self.engine.step(lr)
        _require_finite("gradient norm", grad_norm, step)
        self.step = step
        if metrics.due(step):
            more = {"sequence_length": stage.sequence_length} if self.config.data.curriculum else {}
            metrics.log_step(step, tokens=self.loader.tokens, loss=sums.mean, grad_norm=grad_norm, lr=lr, **more)

    def _validate(self, metrics: MetricsLogger) -> None:
        """The loss on every validation set, with the weights as they are."""
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
        restored = self.checkpoints.restore(self.engine)
        if restored is None:
            self._start_from_weights()
            return 0
        self.loader.load_state_dict(restored.common["data"])
        # From here on the run is without them: they must not count among the checkpoints to keep.
        self.checkpoints.put_aside(restored.damaged)
        for reason in restored.refused:
            self._say(f"passed over a damaged checkpoint, renamed .bad: {reason}")
        if self.is_main:
            self.directory.event("resume", step=restored.step, checkpoint=restored.path.name, refused=restored.refused)
        self._say(f"resuming after step {restored.step} from {restored.path}")
        return restored.step

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
        if self.is_main:
            self.directory.event("init_from", checkpoint=str(restored.path))
        self._say(f"starting from the weights of {restored.path}")

    def _check_tokenizer(self, restored: Restored) -> None:
        """The rows of the embedding mean tokens of the tokenizer that they were trained with."""
        trained, now = restored.common["data"]["fingerprint"]["tokenizer"], self.store.tokenizer
        if trained != now.sha256:
            raise UserError(
                f"{restored.path} was trained with another tokenizer (sha256 {trained[:16]}…) than that of "
                f"{self.store.path} ({now.name}, sha256 {now.sha256[:16]}…); prepare the store with the former"
            )

    def _save(self) -> None:
        checkpoint = self.config.checkpoint
        tokens = self.loader.tokens
        path = self.checkpoints.save(
            self.engine,
            step=self.step,
            common={"data": self.loader.state_dict()},
            facts={"tokens": tokens, "store": self.store.fingerprint()},
        )
        removed = self.checkpoints.prune(keep=checkpoint.keep, keep_every=checkpoint.keep_every)
        if self.is_main:
            self.directory.event("checkpoint", step=self.step, tokens=tokens, checkpoint=path.name, removed=removed)

    def _leave(self, status: Status, reason: str) -> Status:
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

    def _say(self, text: str) -> None:
        if self.is_main:
            print(text, file=sys.stderr, flush=True)


def _require_finite(what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise UserError(
            f"the {what} of step {step} is {value}; the run is stopped before that spreads. "
            "Its checkpoints are good; a lower optimizer.lr or longer optimizer.warmup_steps may help"
        )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
