"""Forward and backward passes of micro-batches as CUDA graphs, where their shapes repeat.

A micro-batch of a small model, or of few tokens, takes the host longer to launch than the GPU to compute. A graph is
launched in one call. It is captured once for each shape: tokens, labels, mask, positions and boundaries of documents
lie in buffers of its own, into which each micro-batch is copied; gradients are added to Megatron's buffers in place.
What a graph computes is what the same pass without one computes, bit for bit.

A captured pass holds no collective. So graphs are for models whose layers are whole on every rank; with data ranks, the
first micro-batch of a step, which waits for gathered weights, and the last one, whose gradients are reduced as they
come, run without. The optimizer's step does too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightscale.kernels.common.captures import CannotCapture
from lightscale.kernels.common.documents import boundaries_of_tokens
from lightscale.parallel.megatron import DistributedDataParallel, TransformerConfig
from lightscale.parallel.mesh import Mesh
from lightscale.parallel.micro_batch import MicroBatch

Sums = tuple[Tensor, Tensor, Tensor]
"""Sum of the losses, number of valid tokens, and the sums to report, of a micro-batch."""


def why_not(mesh: Mesh, config: TransformerConfig) -> str | None:
    """What of a run's layout stands against CUDA graphs, a clause; None: nothing."""
    if mesh.device.type != "cuda":
        return "the run is on CPUs"
    for axis, meaning in (
        ("tensor", "tensor ranks exchange activations within layers"),
        ("pipeline", "pipeline stages exchange activations"),
        ("sequence", "sequence ranks exchange states within layers"),
    ):
        if mesh.axes[axis] > 1:
            return f"{meaning} (parallel.{axis} = {mesh.axes[axis]})"
    if config.recompute_granularity is not None:
        return f'recomputation reads states of random numbers (train.recompute = "{config.recompute_granularity}")'
    return None


@dataclass(frozen=True)
class _Shape:
    """What the launches of a micro-batch depend on."""

    rows: int
    tokens: int
    packed: bool
    """Whether a document starts within a row."""
    has_sources: bool
    has_soft_labels: bool
    is_noised: bool


def _shape_of(batch: MicroBatch) -> _Shape | None:
    """None where it depends on what only the device knows."""
    rows, tokens = batch.labels.shape
    if batch.document_starts is None or batch.lengths is not None or not tokens:
        return None
    return _Shape(
        rows,
        tokens,
        len(batch.document_starts[0]) > rows,
        batch.sources is not None,
        batch.soft_labels is not None,
        batch.conditions is not None,
    )


class GraphInputs:
    """The micro-batch that a graph reads: buffers for those of one shape."""

    lengths = None
    # Runs that need them have no graphs.
    label_values: Tensor | None = None
    places: Tensor | None = None

    def __init__(self, batch: MicroBatch, shape: _Shape) -> None:
        self.tokens, self.labels, self.loss_mask = batch.tokens.clone(), batch.labels.clone(), batch.loss_mask.clone()
        self.positions = batch.positions.clone()
        self.sources = None if batch.sources is None else batch.sources.clone()
        self.soft_labels = None if batch.soft_labels is None else batch.soft_labels.clone()
        self.conditions = None if batch.conditions is None else batch.conditions.clone()
        self.wanted = None if batch.wanted is None else batch.wanted.clone()
        self.cu_seqlens = boundaries_of_tokens(self.positions) if shape.packed else None
        # Where every row is one document, they are the same for all micro-batches.
        starts = torch.arange(shape.rows) * shape.tokens
        self.document_starts = None if shape.packed else (starts, torch.zeros_like(starts))

    def fill(self, batch: MicroBatch) -> None:
        """Take the numbers of ``batch``, of the same shape."""
        names = ("tokens", "labels", "loss_mask", "positions", "sources", "soft_labels", "conditions", "wanted")
        for name in names:
            if (buffer := getattr(self, name)) is not None:
                buffer.copy_(getattr(batch, name))
        if self.cu_seqlens is not None:
            self.cu_seqlens.copy_(boundaries_of_tokens(batch.positions))


@dataclass(frozen=True, kw_only=True)
class CapturedPass:
    """A micro-batch whose forward and backward passes are one launch of a graph."""

    replay: Callable[[MicroBatch], Sums]
    batch: MicroBatch
    after: Callable[[], None] | None

    def run(self) -> tuple[Tensor, Callable[[Tensor], Sums]]:
        """Both passes; the output that Megatron's schedule differentiates next, and its sums."""
        total, tokens, reported = self.replay(self.batch)
        if self.after is not None:
            self.after()
        # A leaf: the gradients are there already, and the schedule's backward pass ends here.
        done = total.clone().requires_grad_()
        # The next launch writes these again.
        sums = tokens.clone(), reported.clone()
        return done, lambda output: (output, *sums)


class MicroBatchGraphs:
    """The graphs of an engine.

    Args:
        compute: the forward pass of a micro-batch on a model, and its sums.
        models: the wrapped model, whole.
        mesh: of the engine.
        report: takes the reason, once, where the passes turn out not to be captured.
    """

    def __init__(
        self,
        compute: Callable[["GraphInputs"], Sums],
        model: DistributedDataParallel,
        mesh: Mesh,
        *,
        report: Callable[[str], None],
    ) -> None:
        self._compute, self._model, self._mesh, self._report = compute, model, mesh, report
        self._seen: set[_Shape] = set()
        self._graphs: dict[_Shape, Callable[[MicroBatch], Sums]] = {}
        self.is_refused = False
        self.replayed = 0
        """Micro-batches so far."""

    def of_step(self, batches: Sequence[MicroBatch]) -> list[MicroBatch | CapturedPass]:
        """A step's micro-batches, those that a graph computes as such; graphs are captured where they are due.

        A shape's first step runs without: it compiles kernels and takes cuBLAS's workspaces, which no capture may.
        """
        if self.is_refused:
            return list(batches)
        alone, overlaps = self._mesh.data == 1, self._model.ddp_config.overlap_grad_reduce
        shapes = [_shape_of(batch) for batch in batches]
        self._forget_other_sizes(shapes)
        passes: list[MicroBatch | CapturedPass] = []
        for number, (batch, shape) in enumerate(zip(batches, shapes, strict=True)):
            is_last = number == len(batches) - 1
            if shape is None or not (alone or 0 < number < len(batches) - 1):
                passes.append(batch)
                continue
            replay = self._graph_of(batch, shape)
            if replay is None:
                passes.append(batch)
                continue
            passes.append(
                CapturedPass(
                    replay=replay, batch=batch, after=self._model.start_grad_sync if is_last and overlaps else None
                )
            )
        self._seen.update(shape for shape in shapes if shape is not None)
        if passes and isinstance(passes[0], CapturedPass):
            # Hooks of the forward pass would wait for these.
            self._model.start_param_sync(force_sync=True)
        return passes

    def _forget_other_sizes(self, shapes: Sequence[_Shape | None]) -> None:
        """Graphs of a curriculum's earlier stages hold memory, and do not come again."""
        sizes = {(shape.rows, shape.tokens) for shape in shapes if shape is not None}
        self._graphs = {shape: graph for shape, graph in self._graphs.items() if (shape.rows, shape.tokens) in sizes}

    def _graph_of(self, batch: MicroBatch, shape: _Shape) -> Callable[[MicroBatch], Sums] | None:
        if shape not in self._graphs and shape in self._seen and not self.is_refused:
            try:
                self._graphs[shape] = self._captured(batch, shape)
            except RuntimeError as error:
                # What was captured until then was not run: nothing has changed.
                self._refuse(_reason(error))
        return self._graphs.get(shape)

    def _refuse(self, reason: str) -> None:
        self.is_refused = True
        self._graphs.clear()
        self._report(reason)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    @cached_property
    def _pool(self) -> Any:
        # One for all: their passes do not overlap, and no result of one is read behind the next.
        return torch.cuda.graph_pool_handle()

    def _both_passes(self, inputs: GraphInputs) -> Sums:
        """Gradients of a micro-batch, added to Megatron's buffers, and its sums."""
        with _own_leaves(self._model):
            total, tokens, reported = self._compute(inputs)
            torch.autograd.backward(total)
        return total.detach(), tokens, reported

    def _captured(self, batch: MicroBatch, shape: _Shape) -> Callable[[MicroBatch], Sums]:
        """A function that copies a micro-batch of ``shape`` into the graph's and launches it."""
        inputs, graph = GraphInputs(batch, shape), torch.cuda.CUDAGraph()
        # Whatever the allocator has cached of earlier passes, the graph's memory may need.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Only this thread's calls are looked at: the prefetcher's pins memory.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                sums = self._both_passes(inputs)
            except BaseException:
                _abandon(graph)
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)

        def replay(batch: MicroBatch) -> Sums:
            inputs.fill(batch)
            graph.replay()
            self.replayed += 1
            return sums

        return replay


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that has failed; the allocator serves others again."""
    # It reports once more that it has failed.
    with suppress(RuntimeError):
        graph.capture_end()


def _reason(error: RuntimeError) -> str:
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return first if isinstance(error, CannotCapture) else f"the capture failed: {first}"


@contextmanager
def _own_leaves(model: nn.Module) -> Iterator[None]:
    """While this is open, the model's parameters are leaves of the same memory, made on the current stream.

    The node at which a gradient accumulates belongs to the stream of its first pass. Megatron keeps the nodes of its
    parameters, and its optimizer keeps those of fp32: a backward pass on another stream would wait for that one, which
    no capture may. Of these leaves gradients are added to Megatron's buffers as its own hooks do; hooks that gather
    weights or reduce gradients do not have them.
    """
    leaves: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in model.parameters():
        leaf = leaves[parameter] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        # Megatron's marks, and the buffer of the gradient.
        vars(leaf).update(vars(parameter), grad_added_to_main_grad=False)
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(_add_gradient)
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    for module, name, parameter in places:
        module.register_parameter(name, leaves[parameter])
    try:
        yield
    finally:
        for module, name, parameter in places:
            module.register_parameter(name, parameter)


def _add_gradient(leaf: Any) -> None:
    if not leaf.grad_added_to_main_grad or getattr(leaf, "zero_out_wgrad", False):
        leaf.main_grad.add_(leaf.grad)
    leaf.grad = None
