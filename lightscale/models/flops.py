"""Floating-point operations that a model needs, for MFU: matrix products only, at the chunk that kernels use.

The quadratic formula of softmax attention never stands in for a linear mixer.
"""

from lightscale.config import ModelConfig
from lightscale.models.registry import mixer_class, shared_parts
from lightscale.models.tpe import TPE


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Multiplications and additions of one forward pass, per token: projections, mixers, GLUs and logits."""
    glu = 2 * 3 * model.width * model.glu_width
    logits = 2 * model.width * model.vocab_size
    mixers = sum(
        mixer_class(name).forward_flops_per_token(model, layer, sequence_length)
        for layer, name in enumerate(model.layers)
    )
    tpe = TPE.forward_flops_per_token(model) if "tpe" in shared_parts(model) else 0
    return tpe + mixers + model.num_layers * glu + logits


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Three times the forward pass: the backward pass takes two products for each. Recomputation is not counted."""
    return 3 * forward_flops_per_token(model, sequence_length)
