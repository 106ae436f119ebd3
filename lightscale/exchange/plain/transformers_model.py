"""The model as transformers has models: its configuration, its cache of states, and the classes that are loaded."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput, SequenceClassifierOutput

from lightscale.exchange.plain.decay_mixer import DecayMixer, ScalarDecay
from lightscale.exchange.plain.lion import Lion
from lightscale.exchange.plain.mixers import (
    CosFormer2Mixer,
    LightNetMixer,
    State,
    TNLMixer,
    ToeplitzEncoding,
    ToeplitzForm,
    wavelengths,
)
from lightscale.exchange.plain.model import FORMS, BoundTable, Decoder, Norm, Shape, pooled, soft_capped
from lightscale.exchange.plain.softmax_mixer import Attention, QueryKeyNorm, RopeScaling


class LightscaleConfig(PreTrainedConfig):
    """The shape of a lightscale model; the arguments are those of ``Shape``."""

    model_type = "lightscale"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 512,
        hidden_size: int = 64,
        num_attention_heads: int = 4,
        intermediate_size: int = 192,
        mixers: Sequence[str] = ("tnl", "tnl"),
        gate_ranks: dict[str, int] | None = None,
        glu_activation: str = "none",
        norm: str = "srmsnorm",
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
        self.norm_placement, self.zero_centered_norm = norm_placement, zero_centered_norm
        self.embedding_multiplier, self.final_logit_cap = embedding_multiplier, final_logit_cap
        self.initializer_range = initializer_range
        # The fields of ``Attention``, of the mixers "llama" and "llama-local".
        self.softmax_attention, self.local_attention = softmax_attention, local_attention
        self.lightnet_causal, self.pooling = lightnet_causal, pooling
        # The fields of ``Lion``, by mixer.
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
            norm=self.norm,
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
            lion={name: Lion(**options) for name, options in self.lion.items()},
            pooling=self.pooling,
            forms={name: FORMS[name](**options) for name, options in self.forms.items()},
            final_norm=self.final_norm,
            toeplitz=ToeplitzForm(**(self.toeplitz or {})),
            learned_positions=self.learned_positions,
        )


def _attention(table: dict[str, Any]) -> Attention:
    scaling = table.get("rope_scaling")
    return Attention(**table | {"rope_scaling": None if scaling is None else RopeScaling(**scaling)})


class StateCache:
    """What ``generate`` hands from one call to the next: a state for each layer, and how many tokens they have seen.

    Without softmax attention its size does not depend on how many those are.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.states: list[State] | None = None
        self.num_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.num_tokens

    def update(self, states: list[State], num_tokens: int) -> None:
        """Take the states behind ``num_tokens`` more tokens."""
        self.states, self.num_tokens = states, self.num_tokens + num_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with the rows ``beam_idx``, for beam search."""
        if self.states is not None:
            self.states = [{name: x.index_select(0, beam_idx) for name, x in state.items()} for state in self.states]

    def reset(self) -> None:
        """As it was before the first token."""
        self.states, self.num_tokens = None, 0

    def state_bytes(self) -> int:
        """Memory that the states hold."""
        return sum(x.numel() * x.element_size() for state in self.states or () for x in state.values())


class LightscaleModel(PreTrainedModel):
    """What the classes that are loaded share; rows are one document each."""

    config_class = LightscaleConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    # Multiplied by positions, or applied thousands of times.
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["theta", "decay_logit", "log_rate", "table"]

    def __init__(self, config: LightscaleConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config.shape())

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Those that a file does not have, as a training begins with them."""
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, (Norm, QueryKeyNorm)) and module.weight is not None:
            nn.init.constant_(module.weight, 0.0 if module.zero_centered else 1.0)
        elif isinstance(module, BoundTable):
            nn.init.ones_(module.table)
        elif isinstance(module, ToeplitzEncoding):
            num_modes = len(module.decay_logit)
            scales = torch.logspace(0, math.log10(4096), num_modes, dtype=torch.float64)
            module.decay_logit.copy_(torch.logit(torch.exp(-1 / scales)))
            if module.gamma is not None:
                nn.init.normal_(module.gamma, std=std / math.sqrt(num_modes))
        elif isinstance(module, (TNLMixer, LightNetMixer)) and module.theta is not None:
            module.theta.copy_(wavelengths(*module.theta.shape))
        elif isinstance(module, DecayMixer):
            module.begin()
        elif isinstance(module, CosFormer2Mixer):
            module.theta.copy_(wavelengths(1, module.theta.size(1)).expand_as(module.theta))


def given_tokens(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Ids (b, n) or embeddings (b, n, d), and the mask (b, n) bool of these tokens; ValueError where there are none."""
    x = input_ids if inputs_embeds is None else inputs_embeds
    if x is None:
        raise ValueError("input_ids or inputs_embeds must be given")
    if attention_mask is None:
        return x, None
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must be (b, n), got {tuple(attention_mask.shape)}")
    return x, attention_mask[:, -x.size(1) :].bool()


class LightscaleForCausalLM(LightscaleModel, GenerationMixin):
    """Token ids to logits of the next token."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LightscaleConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **more: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and with ``labels`` (b, n), which are shifted here, their loss.

        Args:
            input_ids: (b, n), or ``inputs_embeds`` (b, n, d).
            attention_mask: (b, n), or (b, tokens so far), 1 for real tokens; padding may stand anywhere.
            past_key_values: what the call before gave, ``StateCache``.
            labels: (b, n), -100 where none counts.
            use_cache: give ``past_key_values``; None: in evaluation.
            logits_to_keep: how many of the last tokens' logits, or their places; 0: all.
            return_dict: False: a tuple.
            more: for the loss. Positions are not taken: they follow from the mask.
        """
        x, mask = given_tokens(input_ids, inputs_embeds, attention_mask)
        if use_cache is None:
            use_cache = past_key_values is not None or not self.training
        states = None if past_key_values is None else past_key_values.states
        hidden, states = self.model(x, states, mask)
        cache = None
        if use_cache:
            cache = StateCache() if past_key_values is None else past_key_values
            cache.update(states, x.size(1))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = soft_capped(self.lm_head(hidden[:, kept]), self.config.final_logit_cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **more)
        if return_dict is False:
            return tuple(part for part in (loss, logits, cache) if part is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)


class LightscaleForMaskedLM(LightscaleModel):
    """Token ids, some of them the mask, to logits of what was there."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LightscaleConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **more: Any,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """Logits (b, n, V), of the mask, the last id, as good as minus infinity; with ``labels`` their loss.

        Args:
            input_ids: (b, n), or ``inputs_embeds`` (b, n, d).
            attention_mask: (b, n), 1 for real tokens; padding may stand anywhere.
            labels: (b, n), -100 where nothing was hidden.
            return_dict: False: a tuple.
            more: for the loss. Positions are not taken: they follow from the mask.
        """
        x, mask = given_tokens(input_ids, inputs_embeds, attention_mask)
        logits = soft_capped(self.lm_head(self.model(x, None, mask)[0]), self.config.final_logit_cap)
        logits = F.pad(logits[..., :-1], (0, 1), value=torch.finfo(logits.dtype).min)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **more)
        if return_dict is False:
            return tuple(part for part in (loss, logits) if part is not None)
        return MaskedLMOutput(loss=loss, logits=logits)


class LightscaleForSequenceClassification(LightscaleModel):
    """Token ids to logits of the row's label."""

    def __init__(self, config: LightscaleConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **more: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits (b, labels), fp32 at least, and with ``labels`` (b,) their loss; see ``LightscaleForMaskedLM``."""
        x, mask = given_tokens(input_ids, inputs_embeds, attention_mask)
        states = pooled(self.model(x, None, mask)[0], mask, self.config.pooling)
        logits = F.linear(states, self.score.weight.to(states.dtype))
        loss = None if labels is None else F.cross_entropy(logits, labels.view(-1))
        if return_dict is False:
            return tuple(part for part in (loss, logits) if part is not None)
        return SequenceClassifierOutput(loss=loss, logits=logits)
