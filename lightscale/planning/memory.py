"""Estimate of a training rank's memory from the configuration alone, with its assumptions."""

from dataclasses import dataclass, replace

from lightscale.config.layout import Layout
from lightscale.config.schema import Attention, Exchange, Recompute, RunConfig
from lightscale.kernels.operators import LOGITS_WORKSPACE_BYTES, loss_chunk_tokens
from lightscale.models.accounting import padded_vocab_size, rank_parameters
from lightscale.parallel.matrices.sharing import whole_state_bytes
from lightscale.parallel.optimizer_spec import MatrixSpec
from lightscale.planning.attention_ways import AttentionWay, attention_way
from lightscale.planning.communication import RankGroup, exchange_buffer_bytes
from lightscale.planning.hardware import H100, Hardware
from lightscale.planning.workload import LayerWork, StageWork, Workload
from lightscale.runs.teacher import teacher_model
from lightscale.training.optimizer.registry import optimizer_spec

_FP32_BYTES = 4
_BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on each rank of one pipeline stage."""

    stage: int
    """From 0."""
    parameters: int
    """Number of parameters on the rank."""
    trained: int
    """Number of those that are trained."""
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Bytes kept from the forward pass for the backward pass."""
    exchange_bytes: int
    """Buffers of the exchange along `sequence`, and its parts kept for the backward pass."""
    logits_bytes: int
    """Bytes during the computation of the loss."""
    block_bytes: int
    """Bytes during the backward pass of a block: recomputed activations and gradients, minus the memory that later
    blocks have released; of the block with the most."""
    teacher_bytes: int = 0
    """Bytes of a frozen teacher, its weights and its answers; or of a reference, its weights."""

    @property
    def total_bytes(self) -> int:
        """Sum of all, with the larger of the last two: the loss has ended when the first block starts."""
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        kept = self.activations_bytes + self.exchange_bytes + self.teacher_bytes
        return states + kept + max(self.logits_bytes, self.block_bytes)


def weight_bytes(config: RunConfig) -> int:
    """Bytes of a weight or an activation; `auto` means a GPU unless the device is the CPU."""
    precision, device = config.train.precision, config.train.device
    return _FP32_BYTES if precision == "fp32" or (precision == "auto" and device == "cpu") else _BF16_BYTES


def assumptions(config: RunConfig, *, searched: bool = False) -> list[str]:
    """Assumptions of the estimate, in sentences; `searched`: for all kinds of recomputation, not the configured one."""
    fp32 = weight_bytes(config) == _FP32_BYTES
    spec = optimizer_spec(config)
    state = spec.state_description + (" and averages of the weights" if spec.ema else "")
    narrow = " (the state in bf16)" if spec.moment_bytes < _FP32_BYTES else ""
    precision = f"train.precision = {config.train.precision}, train.device = {config.train.device}"
    return [
        f"weights and activations in {'fp32' if fp32 else 'bf16'} ({precision})",
        "gradients in fp32, complete on each data and sequence rank",
        f"optimizer: {'' if fp32 else 'main weights and '}{state} in fp32{narrow}, sharded over the data and sequence "
        "ranks",
        *([_MATRICES] if isinstance(spec, MatrixSpec) else []),
        *([_WHOLE] if isinstance(spec, MatrixSpec) and any(map(spec.whole_bytes, spec.matrices)) else []),
        *(sentence for kind, sentence in _KEPT.items() if searched or kind == config.train.recompute),
        "exchange along sequence: the gathered states of one layer, and each layer's incoming state; for softmax "
        "attention the keys and values of all ranks (gather), its own block and two others (ring), or those of some "
        "heads (all_to_all; it and a ring that trades queries keep outputs twice)",
        f"logits: at most {LOGITS_WORKSPACE_BYTES >> 20} MiB at a time, plus the output layer's gradients (of its "
        "weight in fp32), and the last norm's input and output"
        + ("" if config.model.final_logit_cap is None else "; the slope of the cap, in fp32"),
        "backward pass of a block: its recomputed activations, minus the released ones of later blocks; the gradients "
        "of the GLU's two halves and of the residual stream, or what attention across ranks holds; and those of the "
        "output layer. It follows the loss: the larger of the two counts",
        *([_FP8] if config.train.fp8 != "none" else []),
        *([_TEACHER] if config.teacher is not None else []),
        *([_REFERENCE] if config.has_reference else []),
        *([_ADAPTERS] if config.adapters is not None else []),
        "not counted: fp32 intermediates within a layer, other communication buffers, fragmentation of the allocator",
    ]


_WHOLE = (
    "state of whole matrices (moments, preconditioner, eigenbases): each matrix on one rank of its stage; that of the "
    "rank with the most is counted, QR as fast as products"
)
_MATRICES = (
    "step of matrices: they and what is computed of them, two or three times for a moment, in the precision of their "
    "products (bf16, or fp32); after the backward pass, when no activations are held: not counted"
)
_FP8 = (
    "fp8 (train.fp8): inputs of cast products kept in one byte, also where something else keeps them in the precision "
    "of the activations; the casts of one weight and one gradient at a time, and their transposes, are not counted"
)
_TEACHER = (
    "teacher: its weights; the inputs and outputs of all its mixers, or its last hidden states twice, with a chunk of "
    "logits and five fp32 values per logit"
)
_REFERENCE = (
    "reference: a further forward pass of all micro-batches before each step, and without adapters a second copy of "
    "the weights, split over the same ranks"
)
_ADAPTERS = (
    "adapters: gradients, fp32 weights and optimizer state of these alone; the frozen weights in the precision of the "
    "activations. Times leave out their own products, and the products of frozen weights' gradients"
)
_KEPT: dict[Recompute, str] = {
    "none": "activations without recomputation, under 1F1B: inputs and outputs of a block's norms; a mixer's "
    "projections, gates, activated queries and keys, its output before and after norm and gate, if it has them; "
    "decays, in fp32; a GLU's two halves and their product",
    "selective": "activations with selective recomputation: the same without those of the GLU",
    "full": "activations with full recomputation: each block's input; for blocks beyond train.recompute_layers the "
    "same as without recomputation",
}


def rank_memory(config: RunConfig, layout: Layout, stage: int) -> RankMemory:
    """Memory of each rank of pipeline stage `stage` (from 0), with the configured recomputation and exchange."""
    hardware = replace(H100, gpus_per_node=config.parallel.ranks_per_node or H100.gpus_per_node)
    return stage_memory(
        config,
        layout,
        Workload(
            config.model,
            layout.rank_sequence_tokens * layout.sequence,
            config.adapters,
            fp8=config.train.fp8 != "none",
        ),
        stage,
        recompute=config.train.recompute,
        recompute_layers=config.train.recompute_layers,
        exchange=config.parallel.exchange,
        attention=config.parallel.attention,
        hardware=hardware,
    )


def fullest_rank(config: RunConfig, layout: Layout) -> RankMemory:
    """Memory of the stage whose ranks hold most."""
    stages = [rank_memory(config, layout, stage) for stage in range(layout.pipeline)]
    return max(stages, key=lambda memory: memory.total_bytes)


def stage_memory(
    config: RunConfig,
    layout: Layout,
    work: Workload,
    stage: int,
    *,
    recompute: Recompute,
    recompute_layers: int | None = None,
    exchange: Exchange,
    attention: Attention = "gather",
    hardware: Hardware,
) -> RankMemory:
    """Memory of each rank of pipeline stage `stage` (from 0) of `work`."""
    size = weight_bytes(config)
    held = work.stages(tensor=layout.tensor, pipeline=layout.pipeline)[stage]
    parameters, trained = held.parameters, held.trained_parameters
    main = _FP32_BYTES if size < _FP32_BYTES else 0
    spec = optimizer_spec(config)
    state = sum(spec.state_bytes(name) * count for name, count in held.trained.items())
    whole = whole_state_bytes(spec, held.trained, layout.tensor * layout.data * layout.sequence)
    tokens = layout.micro_batch_size * layout.rank_sequence_tokens
    again = held.recomputed(recompute, recompute_layers)
    ways = [attention_way(attention, layer, layout, size) for layer in held.layers]
    # 1F1B: the first stage runs as many micro-batches ahead as there are stages, the last none.
    in_flight = min(layout.num_microbatches, layout.pipeline - stage)
    return RankMemory(
        stage=stage,
        parameters=parameters,
        trained=trained,
        weights_bytes=size * parameters,
        gradients_bytes=_FP32_BYTES * trained,
        optimizer_bytes=max(whole) - (-(main * trained + state) // (layout.data * layout.sequence)),
        activations_bytes=in_flight * tokens * _kept_bytes(work, held, again, layout, recompute, size) // layout.tensor,
        exchange_bytes=_exchange_bytes(
            layout, work, held, ways, again if recompute == "full" else (), in_flight, size, exchange, hardware
        ),
        logits_bytes=_logits_bytes(work, tokens, layout.tensor, size) if held.last else 0,
        block_bytes=tokens * _block_bytes(held, ways, again, layout, recompute, size) // layout.tensor
        + (_output_rows(work, layout.tensor) * work.model.hidden_size * size if held.last and not work.adapter else 0),
        teacher_bytes=_teacher_bytes(config, layout, tokens, size)
        + (size * sum(held.held.values()) if config.has_reference and config.adapters is None else 0),
    )


def _teacher_bytes(config: RunConfig, layout: Layout, tokens: int, size: int) -> int:
    """Weights and answers of the teacher of ``config``, for ``tokens`` per micro-batch and rank; 0: no teacher."""
    model = teacher_model(config)
    if model is None:
        return 0
    (parameters,) = rank_parameters(model, tensor=layout.tensor, pipeline=1)
    hidden = tokens * model.hidden_size * size
    rows = padded_vocab_size(model.vocab_size, layout.tensor) // layout.tensor
    logits = loss_chunk_tokens(tokens, rows * size) * rows * (size + 5 * _FP32_BYTES)
    streams = 2 * model.num_layers * hidden // layout.tensor
    return size * parameters + max(streams, 2 * hidden + logits)


def _output_rows(work: Workload, tensor: int) -> int:
    """Of the output layer's weight, on a rank; a label head is too small to count."""
    has_ids = work.model.head is None and work.model.diffusion is None
    return padded_vocab_size(work.model.vocab_size, tensor) // tensor if has_ids else 0


def _logits_bytes(work: Workload, tokens: int, tensor: int, size: int) -> int:
    """While the loss is computed: a chunk's logits, and the gradients of the hidden states and the output layer.

    The hidden states are there twice, before and behind the last norm; those behind it whole on every tensor rank.
    """
    width = work.model.hidden_size
    if work.model.head is not None:
        # The states of all tokens that are pooled, in fp32, and their gradient.
        return 2 * tokens * width * _FP32_BYTES
    if work.model.diffusion is not None:
        # The states before and behind the norm and the modulation, and their gradients; predictions are narrow.
        return 6 * tokens * width * size // tensor
    rows = _output_rows(work, tensor)
    # With a cap, its derivative in fp32 too.
    values = size + (_FP32_BYTES if work.model.final_logit_cap is not None else 0)
    logits = loss_chunk_tokens(tokens, rows * size) * rows * values
    # The weight's gradient is summed in fp32, and rounded when the logits of the last chunk are gone.
    rounded = rows * width * size if size < _FP32_BYTES else 0
    hidden = tokens * width * size
    states = 2 * hidden // tensor + (hidden if tensor > 1 else 0)
    if work.adapter is not None:
        # A frozen output layer has no gradient.
        return logits + states + hidden
    return max(logits, rounded) + states + hidden + rows * width * _FP32_BYTES


def _kept_bytes(
    work: Workload, held: StageWork, again: tuple[LayerWork, ...], layout: Layout, recompute: Recompute, size: int
) -> int:
    """Bytes per token that a stage keeps of a micro-batch; `again`: the first layers, which `recompute` concerns."""
    gathers = layout.sequence > 1
    layers = sum(layer.kept_bytes(recompute, size, gathers=gathers) for layer in again)
    layers += sum(layer.kept_bytes("none", size, gathers=gathers) for layer in held.layers[len(again) :])
    # What is recomputed with its block is not kept; of the GLU's adapters alone it would be less.
    share = 1 - len(again) / max(len(held.layers), 1) if recompute == "full" else 1
    layers += int(share * held.adapter_values) * size
    # Parts behind the word embedding keep what they read.
    return layers + (len(work.embedding_parts) * work.model.hidden_size * size if held.first else 0)


def _block_bytes(
    held: StageWork,
    ways: list[AttentionWay | None],
    again: tuple[LayerWork, ...],
    layout: Layout,
    recompute: Recompute,
    size: int,
) -> int:
    """Bytes per token by which a backward pass ever holds more than was kept for it: in the block where that is most.

    Blocks behind it have given back what they kept: where these are not computed again, what is computed again takes
    the place of that.
    """
    gathers, most, given_back = layout.sequence > 1, 0, 0
    for number, layer in reversed(list(enumerate(held.layers))):
        way = ways[number]
        gathered = 0 if way is None else size * way.kept
        kept = whole = layer.kept_bytes("none", size, gathers=gathers) + gathered
        holds = layer.backward_bytes(size, attention_bytes=0 if way is None else way.backward_bytes)
        if number < len(again):
            kept = layer.kept_bytes(recompute, size, gathers=gathers) + (0 if recompute == "full" else gathered)
            # All of its activations, and its output, which nothing reads again.
            holds += whole - kept + layer.kept_bytes("full", size, gathers=gathers)
        most = max(most, holds - given_back)
        given_back += kept
    return most


def _exchange_bytes(
    layout: Layout,
    work: Workload,
    held: StageWork,
    ways: list[AttentionWay | None],
    again: tuple[LayerWork, ...],
    in_flight: int,
    size: int,
    exchange: Exchange,
    hardware: Hardware,
) -> int:
    if layout.sequence == 1:
        return 0
    group = RankGroup(ranks=layout.sequence, stride=layout.tensor, hardware=hardware)
    row_bytes = _FP32_BYTES * layout.micro_batch_size
    summaries = [work.summary(layer, layout.tensor) for layer in held.layers if layer.has_state]
    summaries += work.embedding_part_summaries(layout.tensor).values() if held.first else []
    buffers = [exchange_buffer_bytes(exchange, group, row_bytes * one.numbers, one.heads) for one in summaries]
    # What attention keeps of other ranks stays for the backward pass, unless it is computed again with its block.
    tokens = layout.micro_batch_size * layout.rank_sequence_tokens
    kept_of = [0 if way is None else tokens * way.kept * size // layout.tensor for way in ways]
    kept = in_flight * sum(kept_of[len(again) :])
    buffers += [0 if way is None else tokens * way.forward_bytes // layout.tensor for way in ways]
    # Of the gathered tails a rank keeps as many tokens as it contributes.
    tails = [layout.micro_batch_size * layer.tail * size // layout.tensor for layer in held.layers]
    buffers += [layout.sequence * tail for tail in tails]
    kept += in_flight * sum(tails)
    states = row_bytes * sum(one.state for one in summaries)
    return in_flight * states + kept + int(max(buffers))
