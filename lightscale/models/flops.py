"""Floating-point operations that a model needs, for MFU: matrix products only, at the chunk that kernels use.

The quadratic formula of softmax attention never stands in for a linear mixer.
"""

from lightscale.config.model import ModelConfig
from lightscale.config.schema import AdapterConfig
from lightscale.models.adapters import adapted_maps, linear_maps
from lightscale.models.registry import mixer_spec, shared_specs
from lightscale.models.specs.label_head import head_flops
from lightscale.models.specs.patches import patch_numbers


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Multiplications and additions of one forward pass, per token: projections, mixers, GLUs and logits."""
    # Gate, up and down. The embedding is a look-up and counts once only, as the output layer.
    glu = linear_unit_flops(model)
    logits = 2.0 * model.hidden_size * model.vocab_size
    if model.head is not None:
        # Of each document, or pair; how many there are in a sequence is not known, but one there is.
        logits = head_flops(model.head, model.hidden_size) / sequence_length
    if model.patches is not None and model.diffusion is not None:
        logits = 2.0 * model.hidden_size * patch_numbers(model.patches)
    mixers = sum(
        mixer_spec(name).forward_flops_per_token(model, layer, sequence_length)
        for layer, name in enumerate(model.layers)
    )
    parts = sum(part.forward_flops_per_token(model) for part in shared_specs(model))
    return parts + mixers + model.num_layers * glu + logits


def linear_unit_flops(model: ModelConfig) -> float:
    """Of one block's gated linear unit, or of the two linear maps in its place, forward, per token."""
    return 2 * (3 if model.gated_linear_unit else 2) * model.hidden_size * model.intermediate_size


def training_flops_per_token(
    model: ModelConfig,
    sequence_length: int,
    *,
    teacher: ModelConfig | None = None,
    adapter: AdapterConfig | None = None,
) -> float:
    """Three times the forward pass: the backward pass takes two products for each. Recomputation is not counted.

    ``teacher``: a frozen model that the run learns from; its forward pass is added. ``adapter``: beside frozen weights,
    whose products the backward pass takes once: of inputs alone.
    """
    taught = 0.0 if teacher is None else forward_flops_per_token(teacher, sequence_length)
    whole = 3 * forward_flops_per_token(model, sequence_length) + taught
    if adapter is None:
        return whole
    frozen = sum(2.0 * one.width_in * one.width_out for one in linear_maps(model))
    frozen += 2.0 * model.hidden_size * model.vocab_size if model.head is None else 0.0
    added = sum(2.0 * adapter.r * (one.width_in + one.width_out) for one in adapted_maps(model, adapter))
    return whole - frozen + 3 * added
