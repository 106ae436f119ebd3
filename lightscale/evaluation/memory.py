"""Memory of a training rank, from the configuration alone: an estimate, with what it counts and what it leaves out."""

from dataclasses import dataclass

from lightscale.config import Layout, ModelConfig, RunConfig
from lightscale.models.accounting import rank_parameters
from lightscale.models.registry import mixer_class

_FP32_BYTES = 4
_BF16_BYTES = 2
_ADAM_BYTES = 2 * _FP32_BYTES


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
    logits_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of these."""
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.activations_bytes + self.logits_bytes


def weight_bytes(config: RunConfig) -> int:
    """Bytes of a weight or an activation; `auto` is taken as on a GPU, unless the device is the CPU."""
    precision, device = config.train.precision, config.train.device
    return _FP32_BYTES if precision == "fp32" or (precision == "auto" and device == "cpu") else _BF16_BYTES


def assumptions(config: RunConfig) -> list[str]:
    """What the estimate counts, in sentences."""
    fp32 = weight_bytes(config) == _FP32_BYTES
    precision = f"train.precision = {config.train.precision}, train.device = {config.train.device}"
    return [
        f"weights and activations in {'fp32' if fp32 else 'bf16'} ({precision})",
        "gradients in fp32, whole on each data and sequence rank",
        f"optimizer: {'' if fp32 else 'main weights and '}Adam's two moments in fp32, shared out over the data and "
        "sequence ranks",
        "activations without recomputation, under 1F1B: inputs and outputs of a block's norms; a mixer's projections, "
        "gates, queries and keys activated and rotated by learnable angles, its output, normalised and gated; a GLU's "
        "two halves, Megatron's copy of one, one activated, and their product",
        "logits: probabilities and their gradient in fp32, and the gradient in the dtype of the weights",
        "not counted: fp32 intermediates of mixers and kernels, buffers of communication, the allocator's gaps",
    ]


def activation_values(model: ModelConfig, layer: int) -> int:
    """Numbers that layer `layer` (from 0) keeps per token for the backward pass; see `assumptions`."""
    d, g = model.width, model.glu_width
    weights = mixer_class(model.layers[layer]).parameter_shapes(model, layer)
    projected = sum(shape[0] for name, shape in weights.items() if name.endswith(".weight") and "out_proj" not in name)
    # Learnable angles: rotated queries and keys of twice the width; angles, cosines and sines.
    rotated = 7 * d if "lrpe.theta" in weights else 0
    mixer = projected + 2 * d + rotated + 3 * d
    glu = (5 if model.glu_activation != "none" else 4) * g
    return 4 * d + mixer + glu


def rank_memory(config: RunConfig, layout: Layout, stage: int) -> RankMemory:
    """What each rank of pipeline stage `stage` (from 0) holds."""
    model, size = config.model, weight_bytes(config)
    parameters = rank_parameters(model, tensor=layout.tensor, pipeline=layout.pipeline, stage=stage)
    main = _FP32_BYTES if size < _FP32_BYTES else 0
    tokens = layout.micro_batch_size * layout.rank_sequence_tokens
    per_stage = model.num_layers // layout.pipeline
    values = sum(activation_values(model, layer) for layer in range(stage * per_stage, (stage + 1) * per_stage))
    # 1F1B: the first stage runs as many micro-batches ahead as there are stages, the last none.
    in_flight = min(layout.num_microbatches, layout.pipeline - stage)
    cast = size if size < _FP32_BYTES else 0
    logits = tokens * model.vocab_size * (2 * _FP32_BYTES + cast) if stage == layout.pipeline - 1 else 0
    return RankMemory(
        stage=stage,
        parameters=parameters,
        weights_bytes=size * parameters,
        gradients_bytes=_FP32_BYTES * parameters,
        optimizer_bytes=-(-(main + _ADAM_BYTES) * parameters // (layout.data * layout.sequence)),
        activations_bytes=in_flight * tokens * values * size // layout.tensor,
        logits_bytes=logits // layout.tensor,
    )


def fullest_rank(config: RunConfig, layout: Layout) -> RankMemory:
    """The stage whose ranks hold most."""
    stages = [rank_memory(config, layout, stage) for stage in range(layout.pipeline)]
    return max(stages, key=lambda memory: memory.total_bytes)
