"""config.json as transformers has it: the shape of a model."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from lightscale.exchange.plain.model import Shape, shape_from

_NAMES = {"attention": "softmax_attention", "tied": "tie_word_embeddings"}
"""Names in config.json of fields of ``Shape``, where they differ."""
_OF_TASKS = ("task", "num_labels", "timestep_width")
"""Fields that follow from the class of a model."""


class LightscaleConfig(PreTrainedConfig):
    """The shape of a lightscale model; the arguments are those of ``Shape``."""

    model_type = "lightscale"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    def __init__(
        self,
        vocab_size: int = 512,
        hidden_size: int = 64,
        num_attention_heads: int = 4,
        intermediate_size: int = 192,
        mixers: Sequence[str] = ("tnl", "tnl"),
        gate_ranks: dict[str, int] | None = None,
        glu_activation: str = "none",
        gated_linear_unit: bool = True,
        mlp_bias: bool = False,
        norm: str = "srmsnorm",
        norm_elementwise_affine: bool = False,
        norm_placement: str = "pre",
        zero_centered_norm: bool = False,
        embedding_multiplier: float = 1.0,
        final_logit_cap: float | None = None,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = True,
        softmax_attention: dict[str, Any] | None = None,
        local_attention: dict[str, Any] | None = None,
        lightnet_causal: bool = True,
        lion: dict[str, dict[str, Any]] | None = None,
        pooling: str = "mean",
        head_bias: bool = False,
        image: dict[str, Any] | None = None,
        scalar_decay: dict[str, Any] | None = None,
        forms: dict[str, dict[str, Any]] | None = None,
        final_norm: bool = True,
        toeplitz: dict[str, Any] | None = None,
        learned_positions: int = 0,
        **more: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_attention_heads, self.num_hidden_layers = num_attention_heads, len(mixers)
        self.mixers, self.gate_ranks = list(mixers), dict(gate_ranks or {})
        self.glu_activation, self.norm, self.rms_norm_eps = glu_activation, norm, rms_norm_eps
        self.gated_linear_unit, self.mlp_bias = gated_linear_unit, mlp_bias
        self.norm_elementwise_affine, self.head_bias = norm_elementwise_affine, head_bias
        # The fields of ``ImageInputs``, of a model that reads images.
        self.image = image
        self.norm_placement, self.zero_centered_norm = norm_placement, zero_centered_norm
        self.embedding_multiplier, self.final_logit_cap = embedding_multiplier, final_logit_cap
        self.initializer_range = initializer_range
        # The fields of ``Attention``, of the mixers "llama" and "llama-local".
        self.softmax_attention, self.local_attention = softmax_attention, local_attention
        self.lightnet_causal, self.pooling = lightnet_causal, pooling
        # The fields of ``LionForm``, by mixer.
        self.lion = lion or {}
        # Those of ``ScalarDecay``.
        self.scalar_decay = scalar_decay
        # Those of the types in ``FORMS``, by mixer, and of ``ToeplitzForm``.
        self.forms, self.toeplitz = forms or {}, toeplitz
        self.final_norm, self.learned_positions = final_norm, learned_positions
        more.pop("num_hidden_layers", None)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **more)

    def shape(self) -> Shape:
        """What the modules are made of."""
        names = {field.name: _NAMES.get(field.name, field.name) for field in fields(Shape)}
        return shape_from({own: getattr(self, name) for own, name in names.items() if own not in _OF_TASKS})
