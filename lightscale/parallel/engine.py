"""The engine: Megatron's schedules, gradient reduction and optimizer around a model, for any layout.

``forward_backward`` and ``forward_only`` run micro-batches through the pipeline; the gradients that come out are those
of the mean loss over all valid tokens of the step, on every layout. ``gradient_norm`` computes their norm before any
change, and ``apply`` clips and applies them; ``step`` is both.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightscale.parallel.attention_logits import AttentionLogits, clip_shares
from lightscale.parallel.graphs import CapturedPass, GraphInputs, MicroBatchGraphs, why_not
from lightscale.parallel.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TransformerConfig,
    finalize_model_grads,
    get_forward_backward_func,
)
from lightscale.parallel.mesh import Mesh
from lightscale.parallel.micro_batch import MicroBatch, uncounted
from lightscale.parallel.model_shards import ParameterPart, optimizer_shards, parameter_parts, weight_shards
from lightscale.parallel.optimizer_interface import Optimizer, build_optimizer
from lightscale.parallel.optimizer_spec import AveragedSpec, OptimizerSpec
from lightscale.parallel.shards import TensorShard
from lightscale.parallel.weight_gradients import accumulate_in_products


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Sums over all valid tokens of a step and all ranks, fp64 on the host."""

    loss: float
    tokens: int
    by_bucket: tuple[tuple[float, int], ...] = ()
    """(loss, tokens) of each equal part of the rows."""
    by_source: tuple[tuple[float, int], ...] = ()
    """(loss, tokens) of each source."""
    correct: tuple[int, ...] = ()
    """Tokens whose label is among the k most probable ids, for each k that was asked for."""
    z_loss: float | None = None
    """Sum of the terms that ``Engine.z_loss`` adds in training; they are not in ``loss``. None: there are none."""

    @property
    def mean(self) -> float:
        """Mean loss in nats per token."""
        return self.loss / max(self.tokens, 1)

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Share of the tokens whose label is among the k most probable ids, for each k."""
        return tuple(count / max(self.tokens, 1) for count in self.correct)


Step = tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]
"""What Megatron's schedules ask of a micro-batch: the model's output, and what makes ``Engine._sum_losses`` of it."""


class MicroBatchSums(NamedTuple):
    """What an objective makes of the losses of a micro-batch."""

    total: Tensor
    """(), the sum of its losses, whose gradient is taken."""
    number: Tensor
    """() int32, the number of them; over sequence ranks, one has it."""
    reported: tuple[Tensor, ...]
    """(b,) fp64 of each row: sum of the losses, number of them, and further counts (``top``)."""


class Objective(ABC):
    """A loss that is no sum over tokens."""

    def begin(  # noqa: B027 - most need none
        self, engine: "Engine", batches: Sequence[MicroBatch], advance: Callable[[], None] = lambda: None
    ) -> None:
        """Called by all ranks before the passes over ``batches``; it calls ``advance`` before each of its own."""

    @abstractmethod
    def __call__(self, batch: MicroBatch, losses: Tensor, *, top: bool) -> MicroBatchSums:
        """Of the masked losses of this rank's tokens, (b, n), on the last stage.

        ``top``: with a further count, of those that are right.
        """


def more_inputs(batch: MicroBatch) -> dict[str, Tensor]:
    """Those of a model's forward pass that only some tasks have, by the names of its arguments."""
    names = ("soft_labels", "conditions", "wanted", "places")
    found = {name: getattr(batch, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


Teaching = Callable[[MicroBatch], Mapping[str, Any]]
"""Further arguments of the model's forward pass in training, made from a micro-batch: the answers of a teacher."""


def share_over_stages(parameter: nn.Parameter, *, stage: int) -> None:
    """Mark a parameter of which every pipeline stage holds a copy: the engine keeps the copies equal.

    Their gradients are summed over the stages, and the global norm counts them once.
    """
    parameter.summed_over_stages = True  # type: ignore[attr-defined]
    # Megatron's marks: not in the norm but on the first stage; a bucket of its own, so that the distributed optimizer
    # cuts it alike on every stage, where other parameters would stand before it.
    parameter.shared = stage > 0  # type: ignore[attr-defined]
    parameter.shared_embedding = True  # type: ignore[attr-defined]


def _gather_in_order_of_use(model: DistributedDataParallel) -> None:
    """Let each bucket's weights be gathered while those are used that the forward pass needs before.

    Megatron's own order is that of its buffers, one for each dtype, and in them that of registration: where weights are
    used in another, it waits in the middle and warns that the gathering after them was begun twice. So the order is
    seen in the first pass, in which every bucket is gathered when it is needed; it is the same on all data ranks.
    """
    groups = model.param_to_bucket_group
    used: dict[Any, None] = {}
    for group in groups.values():
        group.next_param_gather_bucket_group = None

    def use(module: nn.Module, _: object) -> None:
        for weight in module.parameters(recurse=False):
            if weight in groups:
                used.setdefault(groups[weight])

    def finish(*_: object) -> None:
        for hook in hooks:
            hook.remove()
        # Those that no module of this pass reads, after all others.
        order = list(dict.fromkeys([*used, *groups.values()]))
        for group, following in itertools.pairwise(order):
            group.next_param_gather_bucket_group = following

    hooks = [module.register_forward_pre_hook(use) for module in model.module.modules()]
    hooks.append(model.register_forward_hook(finish))


class Engine:
    """One model on one mesh.

    Args:
        model: the layers of this pipeline rank, one module per virtual stage (Megatron's "model chunks", here
            ``chunks``); their weights are already drawn.
        config: the model's Megatron configuration.
        mesh: the axes and groups of this process.
        optimizer: None for a model that is only evaluated.
        position_buckets: number of equal parts of a row whose losses are summed separately.
        num_sources: sources whose losses are summed apart; 0: losses are not summed by source.
        overlap: reduce gradients and gather weights beside the computation; None: on GPUs, which alone gain by it.
        bucket_size: parameters that are reduced and gathered together, with ``overlap``; None: Megatron's choice.
        teach: of every micro-batch that is trained on, never in ``forward_only``; None: labels are all that is learned.
        z_loss: factor of log² Z, the softmax's normaliser, in the loss that is trained on, never in ``forward_only``.
        objective: of the tokens' losses, in training and in ``forward_only``; None: their sum.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        config: TransformerConfig,
        mesh: Mesh,
        *,
        optimizer: OptimizerSpec | None = None,
        position_buckets: int = 1,
        num_sources: int = 0,
        overlap: bool | None = None,
        bucket_size: int | None = None,
        teach: Teaching | None = None,
        z_loss: float = 0.0,
        objective: Objective | None = None,
    ) -> None:
        self.objective = objective
        self.mesh, self.config, self.teach, self.z_loss = mesh, config, teach, z_loss
        self.position_buckets, self.num_sources = position_buckets, num_sources
        self.chunks: list[nn.Module] = [model] if isinstance(model, nn.Module) else list(model)
        self.models: list[DistributedDataParallel] = []
        self.optimizer: Optimizer | None = None
        self.logits: AttentionLogits | None = None
        self._measures_logits = False
        self.graphs: MicroBatchGraphs | None = None
        self._is_unreduced = False
        self._reduction: Callable[[], None] | None = None
        if optimizer is not None:
            # gloo's collectives run on the cores that compute: beside the computation they gain nothing.
            self._wrap(optimizer, mesh.device.type == "cuda" if overlap is None else overlap, bucket_size)

    @property
    def module(self) -> nn.Module:
        """The model of a rank without virtual stages."""
        (module,) = self.chunks
        return module

    def _wrap(self, spec: OptimizerSpec, overlap: bool, bucket_size: int | None) -> None:
        # The distributed optimizer refuses fp64 weights. fp64 runs, which only compare gradients with those of other
        # layouts, go without an optimizer, and their gradients are reduced in fp64 too.
        double = self.config.params_dtype == torch.float64
        self.models = [
            DistributedDataParallel(
                config=self.config,
                ddp_config=DistributedDataParallelConfig(
                    # Sums of bf16 gradients over many ranks and micro-batches would lose the small ones.
                    grad_reduce_in_fp32=not double,
                    use_distributed_optimizer=not double,
                    overlap_grad_reduce=overlap,
                    overlap_param_gather=overlap and not double,
                    bucket_size=bucket_size,
                ),
                module=chunk,
                pg_collection=self.mesh.groups,
                # As Megatron does: buckets of later virtual stages come last in the backward pass: nothing can overlap.
                disable_bucketing=number > 0,
            )
            for number, chunk in enumerate(self.chunks)
        ]
        for model in self.models:
            _gather_in_order_of_use(model)
            if not double:
                accumulate_in_products(model)
        self.config.finalize_model_grads_func = self._finalize_gradients
        # With overlap a bucket's reduction starts in the backward pass as soon as its last gradient is there; only the
        # last micro-batch's is complete, which is when the schedules call these.
        if overlap:
            # The schedule without stages wants a function, the interleaved one a list.
            no_sync, start_sync = zip(*((model.no_sync, model.start_grad_sync) for model in self.models), strict=True)
            single = len(self.models) == 1
            self.config.no_sync_func = no_sync[0] if single else list(no_sync)
            self.config.grad_sync_func = start_sync[0] if single else list(start_sync)
        if not double:
            self.optimizer = build_optimizer(spec, self.models, self.config, on_gpu=self.mesh.device.type == "cuda")
        self.logits = AttentionLogits(self.chunks, self.mesh)
        self.mesh.ends.callback(self._release)

    def capture_graphs(self, report: Callable[[str], None], *, against: str | None = None) -> None:
        """From here on, compute the micro-batches of steps as CUDA graphs where their shapes repeat.

        Args:
            report: takes the reason, once, where they are not: now, or when the first capture fails.
            against: a reason that the caller knows.
        """
        assert self.models, "this engine is not trained"
        taught = None if self.teach is None else "a teacher answers every micro-batch (task.teacher)"
        clipped = None if self._clip is None else "attention logits are measured (optimizer.qk_clip)"
        coupled = None if self.objective is None else "the loss of a micro-batch is no sum over its tokens (task.name)"
        reason = against or taught or clipped or coupled or why_not(self.mesh, self.config)
        if reason is not None:
            report(reason)
            return
        (model,) = self.models
        self.graphs = MicroBatchGraphs(partial(self._pass, model), model, self.mesh, report=report)

    def _release(self) -> None:
        """Drop what holds parameters from C++, where the garbage collector does not look.

        Parameters refer to modules (their initializers) and to the optimizer's tensors. With an owner in C++ such a
        cycle is never freed, and the engine and the mesh's groups would stay for as long as the process.
        """
        self.optimizer = self.graphs = self._reduction = None
        for model in self.models:
            model.grad_accs.clear()

    def _finalize_gradients(self, model: list[nn.Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
        # Sums over data and sequence ranks, and divides by the number of valid tokens of all of them. That is a whole
        # number, of which Megatron takes the inverse in fp32 and so scales all gradients of fp64 runs by up to 6e-8.
        count = None if num_tokens is None else num_tokens.double()
        finalize_model_grads(model, count, **{**kwargs, "pg_collection": self.mesh.groups})
        copies: dict[str, list[Tensor]] = {}
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if getattr(parameter, "summed_over_stages", False) and parameter.requires_grad:
                    copies.setdefault(name, []).append(parameter.main_grad)  # type: ignore[attr-defined]
        for gradients in copies.values():
            # Virtual stages have copies too. Names come in the order of the modules, the same on every stage, so all
            # ranks issue these sums in one order. In it every stage gets the same bits, and so the copies stay equal.
            total = torch.stack(gradients).sum(dim=0)
            dist.all_reduce(total, group=self.mesh.groups.pp)
            for gradient in gradients:
                gradient.copy_(total)

    def forward_backward(
        self, batches: Sequence[MicroBatch], *, measure_logits: bool = False, reduce: bool = True
    ) -> LossSums:
        """Gradients of the mean loss over the valid tokens of all ranks' ``batches``; any earlier ones are dropped.

        Args:
            batches: of this data rank.
            measure_logits: keep the largest attention logits for ``largest_logits``, as QK-clip does at every step.
            reduce: False: each rank keeps the gradients of its own ``batches``, neither summed over ranks nor divided,
                in ``main_grad`` of its parameters; ``reduce_gradients`` makes of them what True does, bit by bit.
        """
        if self.objective is not None:
            self.objective.begin(self, batches)
        for model in self.models:
            model.train()
            model.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self._measures_logits = measure_logits or self._clip is not None
        if self.logits is not None:
            self.logits.begin(measure=self._measures_logits)
        with nullcontext() if reduce else self._unreduced():
            return self._run(batches, forward_only=False)

    def reduce_gradients(self) -> None:
        """Sum and divide the gradients that ``forward_backward(…, reduce=False)`` has left."""
        assert self._reduction is not None, "forward_backward(…, reduce=False) comes before"
        with self._without_overlap():
            self._reduction()
        self._reduction = None

    @contextmanager
    def _unreduced(self) -> Iterator[None]:
        """Megatron's schedules without their reduction, which is kept for ``reduce_gradients``."""
        before = self.config.finalize_model_grads_func, self.config.grad_sync_func
        self.config.finalize_model_grads_func, self.config.grad_sync_func = self._keep_reduction, None
        self._is_unreduced = True
        try:
            with self._without_overlap():
                yield
        finally:
            self._is_unreduced = False
            self.config.finalize_model_grads_func, self.config.grad_sync_func = before

    def _keep_reduction(self, *arguments: Any, **kwargs: Any) -> None:
        self._reduction = partial(self._finalize_gradients, *arguments, **kwargs)

    @contextmanager
    def _without_overlap(self) -> Iterator[None]:
        """No reduction begins in a backward pass; one that is asked for is complete when it returns."""
        configs = [model.ddp_config for model in self.models]
        before = [config.overlap_grad_reduce for config in configs]
        for config in configs:
            config.overlap_grad_reduce = False
        try:
            yield
        finally:
            for config, overlaps in zip(configs, before, strict=True):
                config.overlap_grad_reduce = overlaps

    @torch.no_grad()
    def forward_only(
        self, batches: Sequence[MicroBatch], *, top: Sequence[int] = (), advance: Callable[[], None] = lambda: None
    ) -> LossSums:
        """The loss of ``batches`` without gradients. Every data rank gives the same number of micro-batches, any one.

        Args:
            batches: of this data rank.
            top: numbers k; count the labels that are among the k most probable ones too.
            advance: called before each micro-batch.
        """
        if len(self.chunks) > 1:
            # Interleaved stages take groups of as many as there are stages; micro-batches that count nothing fill them.
            batches = [*batches, *[uncounted(batches[-1])] * (-len(batches) % self.mesh.pipeline)]
        if self.objective is not None:
            self.objective.begin(self, batches, advance)
        for chunk in self.chunks:
            chunk.eval()
        if top and any(model.ddp_config.overlap_param_gather for model in self.models):
            # Then the output layer is read without a call of its own, which would wait for its weights.
            self.gather_weights()
        return self._run(batches, forward_only=True, top=top, advance=advance)

    def _run(
        self,
        batches: Sequence[MicroBatch],
        *,
        forward_only: bool,
        top: Sequence[int] = (),
        advance: Callable[[], None] = lambda: None,
    ) -> LossSums:
        run = get_forward_backward_func()
        scoring = partial(self._forward_step, top=tuple(top)) if top else self._forward_step
        if self.objective is not None:
            scoring = partial(self._judged_step, top=bool(top))
        step = scoring if forward_only else self._training_step
        # Taken from the batch: a curriculum's stages differ in both.
        micro_batch_size, rank_tokens = batches[0].labels.shape
        # A graph holds no measurement of attention logits, and calls no module while it is replayed.
        graphs = None if forward_only or self._measures_logits or self._is_unreduced else self.graphs
        passes = batches if graphs is None else graphs.of_step(batches)
        # Every virtual stage goes through all micro-batches by itself.
        iterators = [_each(passes, advance) for _ in self.chunks]
        outputs: list[Tensor] = run(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.models or self.chunks,
            num_microbatches=len(batches),
            # Of the whole row: for the shapes that stages send, Megatron divides by tensor and sequence ranks itself.
            seq_length=rank_tokens * self.mesh.sequence,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
        )
        return self._reduce(outputs, num_top=len(top), with_z_loss=not forward_only and self.z_loss > 0)

    def _forward_step(self, batches: Iterator[MicroBatch], model: nn.Module, **how: Any) -> Step:
        batch = next(batches)
        return self._forward(model, batch, **how), partial(self._sum_losses, batch)

    def _judged_step(self, batches: Iterator[MicroBatch], model: nn.Module, *, top: bool) -> Step:
        batch = next(batches)
        return self._forward(model, batch), partial(self._sum_judged, batch, top=top)

    def _sum_judged(self, batch: MicroBatch, losses: Tensor, *, top: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """``_sum_losses`` by the objective; all losses are of the first bucket."""
        assert self.objective is not None
        total, count, rows = self.objective(batch, losses, top=top)
        sums = self._zero_sums(len(rows))
        for total_of, row in zip(sums, rows, strict=True):
            total_of[0] += row.sum()
            if self.num_sources:
                assert batch.sources is not None
                total_of.index_add_(0, self.position_buckets + batch.sources, row)
        return total, count, sums

    def _forward(self, model: nn.Module, batch: MicroBatch, **how: Any) -> Tensor:
        output: Tensor = model(
            batch.tokens,
            batch.positions,
            batch.labels,
            loss_mask=batch.loss_mask,
            document_starts=batch.document_starts,
            lengths=batch.lengths,
            **more_inputs(batch),
            **how,
        )
        return output

    def _pass(self, model: nn.Module, inputs: GraphInputs) -> tuple[Tensor, Tensor, Tensor]:
        """The forward pass of what a graph reads, and its sums."""
        output = self._forward(model, inputs, cu_seqlens=inputs.cu_seqlens, **self._trained)
        return self._sum_losses(inputs, output)

    def _training_step(self, passes: Iterator[MicroBatch | CapturedPass], model: nn.Module) -> Step:
        batch = next(passes)
        if isinstance(batch, CapturedPass):
            return batch.run()
        taught = {} if self.teach is None else self.teach(batch)
        output = self._forward(model, batch, **taught, **self._trained)
        return output, partial(self._sum_losses if self.objective is None else self._sum_judged, batch)

    @property
    def _trained(self) -> dict[str, float]:
        """Further arguments of the model's forward pass in training."""
        return {"z_loss": self.z_loss} if self.z_loss else {}

    def _sum_losses(self, batch: MicroBatch, output: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(sum of the losses, which are masked, number of valid tokens, sums to report) of one micro-batch.

        Those to report are losses and tokens of each bucket, then of each source: (2, buckets + sources) fp64. Where
        ``output`` is not the losses (b, n) but they and what is correct, (1 + k, b, n), its sums are further rows. So
        are those of the terms of ``z_loss``, which come apart and are taken off the losses to report.
        """
        if isinstance(output, tuple):
            losses, terms = output
            shown = [losses.detach().double() - terms.double(), terms]
        else:
            losses, *correct = output if output.dim() == 3 else [output]
            shown = [losses.detach(), *correct]
        # A sum and a count, not a mean: ranks and micro-batches have different numbers of valid tokens, and a mean of
        # their means would weigh a token by the layout. Megatron (calculate_per_token_loss) adds up both over
        # micro-batches and ranks, and divides the gradients once, in _finalize_gradients.
        total = losses.sum()
        n = losses.size(1)
        lengths = batch.lengths or [n] * self.mesh.sequence
        first = sum(lengths[: self.mesh.sequence_rank])
        # Buckets are of the index in the row, which sequence ranks begin in the middle of.
        indices = torch.arange(first, first + n, device=losses.device)
        bucket = indices * self.position_buckets // sum(lengths)
        reported = [one.double() for one in (shown[0], batch.loss_mask, *shown[1:])]
        sums = self._zero_sums(len(reported))
        for total_of, values in zip(sums, reported, strict=True):
            total_of.index_add_(0, bucket, values.sum(dim=0))
            if self.num_sources:
                assert batch.sources is not None
                total_of.index_add_(0, self.position_buckets + batch.sources, values.sum(dim=1))
        return total, batch.loss_mask.sum().int(), sums

    def _reduce(self, outputs: Sequence[Tensor], *, num_top: int, with_z_loss: bool) -> LossSums:
        # Only the last stage has outputs; the others take part with zeros, so that all groups make the same calls.
        sums = self._zero_sums(2 + num_top + with_z_loss)
        for output in outputs:
            sums += output
        dist.all_reduce(sums, group=self.mesh.groups.dp_cp)
        if self.mesh.pipeline * self.mesh.tensor > 1:
            # From the first tensor rank of the last stage: what is decided by the loss is then the same on all ranks,
            # also when a tensor rank alone has computed something else.
            last = dist.get_process_group_ranks(self.mesh.groups.mp)[-self.mesh.tensor]
            dist.broadcast(sums, src=last, group=self.mesh.groups.mp)
        pairs = [(loss, int(count)) for loss, count in zip(*sums[:2].tolist(), strict=True)]
        buckets, sources = pairs[: self.position_buckets], pairs[self.position_buckets :]
        return LossSums(
            loss=sum(loss for loss, _ in buckets),
            tokens=sum(count for _, count in buckets),
            by_bucket=tuple(buckets),
            by_source=tuple(sources),
            correct=tuple(map(int, sums[2 : 2 + num_top, : self.position_buckets].sum(dim=1).tolist())),
            z_loss=float(sums[-1, : self.position_buckets].sum()) if with_z_loss else None,
        )

    def _zero_sums(self, rows: int) -> Tensor:
        shape = (rows, self.position_buckets + self.num_sources)
        return torch.zeros(shape, dtype=torch.float64, device=self.mesh.device)

    def gradient_norm(self) -> float:
        """The global norm of the gradients before clipping, the same on every rank; leaves the weights unchanged.

        NaN or infinite where a gradient of any rank is.
        """
        assert self.optimizer is not None, "this engine has no optimizer"
        return self.optimizer.gradient_norm()

    def apply(self, lr: float) -> None:
        """Clip the gradients by the norms that ``gradient_norm`` found, and apply them at learning rate ``lr``."""
        assert self.optimizer is not None, "this engine has no optimizer"
        if self._clip is not None:
            self.optimizer.head_shares = clip_shares(self.largest_logits(), self._clip)
        self.optimizer.apply(lr)

    @property
    def _clip(self) -> float | None:
        """The largest attention logit that QK-clip leaves; None: it is off."""
        return None if self.optimizer is None else self.optimizer.spec.qk_clip

    def largest_logits(self) -> Tensor:
        """See ``AttentionLogits.largest``; of the last ``forward_backward``, if it measured them."""
        assert self.logits is not None, "this engine is not trained"
        return self.logits.largest()

    def step(self, lr: float) -> float:
        """Apply the gradients, whatever they are; returns their global norm before clipping."""
        grad_norm = self.gradient_norm()
        self.apply(lr)
        return grad_norm

    def reset_optimizer(self) -> None:
        """The optimizer as before the first step, for the weights as they are now."""
        assert self.optimizer is not None, "this engine has no optimizer"
        self.optimizer.reset()

    def take_weights(self) -> None:
        """Let the optimizer add its steps to the model's weights as they are now."""
        if self.optimizer is not None:
            self.optimizer.copy_from_model()

    def parameter_parts(self) -> Iterator[ParameterPart]:
        """The weights that this rank's optimizer changes, between ``gradient_norm`` and the end of ``apply``.

        Every element of the model is one rank's, on any layout.
        """
        assert self.optimizer is not None, "this engine has no optimizer"
        return parameter_parts(self.chunks, self.optimizer)

    def flat_weights(self) -> Iterator[Tensor]:
        """All trained weights, flat, (data x sequence ranks, n): the optimizer of rank r writes row r.

        Between two steps, once the forward pass has gathered them, all rows are the same on all these ranks.
        """
        # The buffers are Megatron's, the buckets' own memory and no copies: what a bit flip changes is seen here.
        for buffer in [buffer for model in self.models for buffer in model.buffers]:
            for bucket in buffer.buckets:
                yield bucket.param_data.view(buffer.data_parallel_world_size, -1)

    def owned_shards(self) -> list[TensorShard]:
        """The shards of weights and optimizer state that this rank writes; every element belongs to one rank.

        With an optimizer its fp32 weights stand for the model's, which are those in the model's number format.
        """
        if self.optimizer is not None:
            return list(optimizer_shards(self.chunks, self.optimizer, copies=False, state=True))
        # Data and sequence ranks all hold the weights whole: the first of them writes.
        return list(weight_shards(self.chunks, copies=False)) if self.mesh.groups.dp_cp.rank() == 0 else []

    def owned_state(self) -> Iterator[Tensor]:
        """The fp32 weights and the optimizer's state of which this rank takes the steps, flat; no copies."""
        if self.optimizer is not None:
            for parameter in [one for chunk in self.chunks for one in chunk.parameters()]:
                owned = self.optimizer.owned(parameter)
                if owned is not None:
                    yield owned.weights
                    yield from owned.state.values()
            yield from (shard.data for shard in self.optimizer.whole_shards())

    def gather_weights(self) -> None:
        """Make the weights those of the last step now, where they would be gathered in the next forward pass."""
        for model in self.models:
            model.start_param_sync(force_sync=True)

    @contextmanager
    @torch.no_grad()
    def read_weights(self) -> Iterator[None]:
        """The model with the weights that checkpoints have, where the optimizer takes gradients at others."""
        if not isinstance(self.optimizer and self.optimizer.spec, AveragedSpec):
            yield
            return
        assert self.optimizer is not None
        self.optimizer.show_read()
        self.gather_weights()
        yield
        self.optimizer.copy_to_model()
        self.gather_weights()

    def wanted_shards(self, *, weights_only: bool) -> list[TensorShard]:
        """The shards that this rank needs of a checkpoint, to fill in place; ``finish_loading`` must follow."""
        if self.optimizer is None:
            return list(weight_shards(self.chunks, copies=True))
        # A gathering of weights that is still on its way would overwrite what is read.
        self.gather_weights()
        return list(optimizer_shards(self.chunks, self.optimizer, copies=True, state=not weights_only))

    def frozen_shards(self) -> list[TensorShard]:
        """The shards of frozen weights that this rank holds, to fill in place from the checkpoint that has them."""
        return list(weight_shards(self.chunks, copies=True, frozen=True))

    @torch.no_grad()
    def finish_loading(self, counters: Mapping[str, float] | None) -> None:
        """Set the model to the optimizer's weights, as after a step; ``counters`` as from ``counters()``."""
        if self.optimizer is None:
            return
        if counters is not None:
            self.optimizer.set_counters(counters)
        # Each rank has filled its own part; gathering gives the model the others', as at the end of a step.
        self.optimizer.copy_to_model()
        self.gather_weights()

    def counters(self) -> dict[str, float]:
        """The optimizer's state that is no tensor of a parameter's shape; the same on every rank."""
        return {} if self.optimizer is None else self.optimizer.counters()

    def gradients(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """(local name, parameter, gradient) of this rank after ``forward_backward``, reduced over all ranks.

        With the distributed optimizer only the part of the flat buffer that this data rank owns is reduced, so the
        buffer is gathered first.
        """
        for buffer in [buffer for model in self.models for buffer in model.buffers]:
            if buffer.ddp_config.use_distributed_optimizer and buffer.data_parallel_world_size > 1:
                for bucket in buffer.buckets:
                    flat = bucket.grad_data
                    own = flat.chunk(buffer.data_parallel_world_size)[buffer.data_parallel_group.rank()].clone()
                    dist.all_gather_into_tensor(flat, own, group=buffer.data_parallel_group)
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if not parameter.requires_grad:
                    continue
                gradient: Any = getattr(parameter, "main_grad")  # noqa: B009 - set by Megatron, unknown to the type
                yield name, parameter, gradient


def _each(
    batches: Iterable[MicroBatch | CapturedPass], advance: Callable[[], None]
) -> Iterator[MicroBatch | CapturedPass]:
    """``batches`` in turn, with a call of ``advance`` before each."""
    for batch in batches:
        advance()
        yield batch
