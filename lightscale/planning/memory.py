"""Memory of a training rank, from the configuration alone: an estimate, with what it counts and what it does not."""

from dataclasses import dataclass, replace

from lightscale.config.layout import Layout
from lightscale.config.schema import Exchange, Recompute, RunConfig
from lightscale.kernels.operators import LOGITS_WORKSPACE_BYTES, loss_chunk_tokens
from lightscale.planning.communication import RankGroup, exchange_buffer_bytes
from lightscale.planning.hardware import H100, Hardware
from lightscale.planning.workload import LayerWork, StageWork, Workload
from lightscale.training.optimizer.registry import optimizer_spec

_FP32_BYTES = 4
_BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on each rank of one pipeline stage."""

    stage: int
    """From 0."""
    parameters: int
    """Number of parameters that the rank holds."""
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    exchange_bytes: int
    """Buffers of the exchange along `sequence`, and what is kept of it for the backward pass."""
    logits_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of these."""
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.activations_bytes + self.exchange_bytes + self.logits_bytes


def weight_bytes(config: RunConfig) -> int:
    """Bytes of a weight or an activation; `auto` is taken as on a GPU, unless the device is the CPU."""
    precision, device = config.train.precision, config.train.device
    return _FP32_BYTES if precision == "fp32" or (precision == "auto" and device == "cpu") else _BF16_BYTES


def assumptions(config: RunConfig, *, searched: bool = False) -> list[str]:
    """What the estimate counts, in sentences; `searched`: for all ways to recompute, not only the configured one."""
    fp32 = weight_bytes(config) == _FP32_BYTES
    state = optimizer_spec(config.optimizer).state_description
    precision = f"train.precision = {config.train.precision}, train.device = {config.train.device}"
    return [
        f"weights and activations in {'fp32' if fp32 else 'bf16'} ({precision})",
        "gradients in fp32, whole on each data and sequence rank",
        f"optimizer: {'' if fp32 else 'main weights and '}{state} in fp32, shared out over the data and sequence ranks",
        *(sentence for kind, sentence in _KEPT.items() if searched or kind == config.train.recompute),
        "exchange along sequence: the gathered states of one layer, and each layer's incoming state; of softmax "
        "attention the keys and values of all ranks",
        f"logits: at most {LOGITS_WORKSPACE_BYTES >> 20} MiB at a time; beside them the output layer's gradients, that "
        "of its weight in fp32",
        "not counted: fp32 intermediates within a layer, other buffers of communication, the allocator's gaps",
    ]


_KEPT: dict[Recompute, str] = {
    "none": "activations without recomputation, under 1F1B: inputs and outputs of a block's norms; a mixer's "
    "projections, gates, activated queries and keys, its output, and that behind norm and gate, where it has them; "
    "decays, in fp32; a GLU's two halves and their product",
    "selective": "activations with selective recomputation: the same without those of the GLU, except for one block",
    "full": "activations with full recomputation: each block's input, and one block without recomputation; of blocks "
    "beyond train.recompute_layers what is kept without recomputation",
}


def rank_memory(config: RunConfig, layout: Layout, stage: int) -> RankMemory:
    """What each rank of pipeline stage `stage` (from 0) holds, recomputing and exchanging as configured."""
    hardware = replace(H100, gpus_per_node=config.parallel.ranks_per_node or H100.gpus_per_node)
    return stage_memory(
        config,
        layout,
        Workload(config.model, layout.rank_sequence_tokens * layout.sequence),
        stage,
        recompute=config.train.recompute,
        recompute_layers=config.train.recompute_layers,
        exchange=config.parallel.exchange,
        hardware=hardware,
    )


def fullest_rank(config: RunConfig, layout: Layout) -> RankMemory:
    """The stage whose ranks hold most."""
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
    hardware: Hardware,
) -> RankMemory:
    """What each rank of pipeline stage `stage` (from 0) of `work` holds."""
    size = weight_bytes(config)
    held = work.stages(tensor=layout.tensor, pipeline=layout.pipeline)[stage]
    parameters = held.parameters
    main = _FP32_BYTES if size < _FP32_BYTES else 0
    state = optimizer_spec(config.optimizer).state_bytes
    tokens = layout.micro_batch_size * layout.rank_sequence_tokens
    again = held.recomputed(recompute, recompute_layers)
    # 1F1B: the first stage runs as many micro-batches ahead as there are stages, the last none.
    in_flight = min(layout.num_microbatches, layout.pipeline - stage)
    return RankMemory(
        stage=stage,
        parameters=parameters,
        weights_bytes=size * parameters,
        gradients_bytes=_FP32_BYTES * parameters,
        optimizer_bytes=-(-(main + state) * parameters // (layout.data * layout.sequence)),
        activations_bytes=tokens * _activation_bytes(held, again, recompute, in_flight, size) // layout.tensor,
        exchange_bytes=_exchange_bytes(
            layout, work, held, again if recompute == "full" else (), in_flight, size, exchange, hardware
        ),
        logits_bytes=_logits_bytes(work, tokens, layout.tensor, size) if held.last else 0,
    )


def _logits_bytes(work: Workload, tokens: int, tensor: int, size: int) -> int:
    """While the loss is computed: a chunk's logits, and the gradients of the hidden states and the output layer."""
    width = work.model.hidden_size
    if work.model.head is not None:
        # The states of all tokens that are pooled, in fp32, and their gradient.
        return 2 * tokens * width * _FP32_BYTES
    rows = work.model.vocab_size // tensor
    logits = loss_chunk_tokens(tokens, rows * size) * rows * size
    # The weight's gradient is summed in fp32, and rounded when the logits of the last chunk are gone.
    rounded = rows * width * size if size < _FP32_BYTES else 0
    return max(logits, rounded) + tokens * width * size + rows * width * _FP32_BYTES


def _activation_bytes(
    held: StageWork, again: tuple[LayerWork, ...], recompute: Recompute, in_flight: int, size: int
) -> int:
    """Bytes per token that a stage keeps, all its micro-batches in flight together; `again`: the first layers."""
    whole = {layer: layer.kept_bytes("none", size) for layer in set(held.layers)}
    kept = {layer: layer.kept_bytes(recompute, size) for layer in set(again)}
    # The block that is just computed again has all of its activations.
    most = max((whole[layer] - layer_bytes for layer, layer_bytes in kept.items()), default=0)
    others = held.layers[len(again) :]
    return in_flight * (sum(kept[layer] for layer in again) + sum(whole[layer] for layer in others)) + most


def _exchange_bytes(
    layout: Layout,
    work: Workload,
    held: StageWork,
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
    # Keys and values of all ranks stay for the backward pass; computed again with their block, those of one block do.
    # While they are put together, the parts as they arrived stand beside them.
    tokens = layout.micro_batch_size * layout.rank_sequence_tokens * layout.sequence
    gathered = [tokens * layer.gathered * size // layout.tensor for layer in held.layers]
    kept = max(gathered[: len(again)], default=0) + in_flight * sum(gathered[len(again) :])
    buffers += gathered
    states = row_bytes * sum(one.state for one in summaries)
    return in_flight * states + kept + int(max(buffers))
