"""config.json as transformers has it: the shape of a model."""

from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from lightscale.exchange.plain.decay_mixer import ScalarDecay
from lightscale.exchange.plain.lion import LionForm
from lightscale.exchange.plain.model import FORMS, Shape
from lightscale.exchange.plain.patches import ImageInputs
from lightscale.exchange.plain.softmax_mixer import Attention, RopeScaling
from lightscale.exchange.plain.toeplitz import ToeplitzForm


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
        attention, local = (_attention(table or {}) for table in (self.softmax_attention, self.local_attention))
        return Shape(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=self.intermediate_size,
            mixers=tuple(self.mixers),
            gate_ranks=self.gate_ranks,
            glu_activation=self.glu_activation,
            gated_linear_unit=self.gated_linear_unit,
            mlp_bias=self.mlp_bias,
            norm=self.norm,
            norm_elementwise_affine=self.norm_elementwise_affine,
            rms_norm_eps=self.rms_norm_eps,
            norm_placement=self.norm_placement,
            zero_centered_norm=self.zero_centered_norm,
            embedding_multiplier=self.embedding_multiplier,
            final_logit_cap=self.final_logit_cap,
            attention=attention,
            local_attention=local,
            scalar_decay=ScalarDecay(**(self.scalar_decay or {})),
            tied=self.tie_word_embeddings,
            lightnet_causal=self.lightnet_causal,
            lion={name: LionForm(**options) for name, options in self.lion.items()},
            pooling=self.pooling,
            head_bias=self.head_bias,
            image=None if self.image is None else _image(self.image),
            forms={name: FORMS[name](**options) for name, options in self.forms.items()},
            final_norm=self.final_norm,
            toeplitz=ToeplitzForm(**(self.toeplitz or {})),
            learned_positions=self.learned_positions,
        )


def _attention(table: dict[str, Any]) -> Attention:
    scaling = table.get("rope_scaling")
    return Attention(**table | {"rope_scaling": None if scaling is None else RopeScaling(**scaling)})


def _image(table: dict[str, Any]) -> ImageInputs:
    # Lists of numbers, as JSON has them.
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return ImageInputs(**fields)
