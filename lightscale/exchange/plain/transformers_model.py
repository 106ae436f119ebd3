"""The model as transformers has models: its cache of states, and the classes that are loaded."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from lightscale.exchange.plain.decay_mixer import DecayMixer
from lightscale.exchange.plain.delta_mixer import DeltaNetMixer
from lightscale.exchange.plain.mixers import (
    CosFormer2Mixer,
    LightNetMixer,
    State,
    TNLMixer,
    wavelengths,
)
from lightscale.exchange.plain.model import Decoder
from lightscale.exchange.plain.patches import PatchMap
from lightscale.exchange.plain.softmax_mixer import QueryKeyNorm
from lightscale.exchange.plain.toeplitz import ToeplitzEncoding
from lightscale.exchange.plain.transformers_config import LightscaleConfig
from lightscale.exchange.plain.units import BoundTable, LabelScores, Norm, pooled, soft_capped


class StateCache:
    """What ``generate`` hands from one call to the next: a state for each layer, and how many tokens they have seen.

    Without softmax attention its size does not depend on how many those are. A state forgets no single token: to take
    tokens back, ``crop`` returns to a state kept before them, and those of them that stay are read again.
    """

    is_compileable = False
    is_croppable = True
    # Of layers, for transformers 5.24: whether all count no tokens. ``get_seq_length`` counts them.
    is_linear = (False,)
    most_back = 256
    """So many tokens can be taken back in any case; longer calls are read in two parts, the last of this size."""

    def __init__(self) -> None:
        self.can_go_back = False
        self.reset()

    def activate_past_recording(self) -> None:
        """From here on keep what ``crop`` needs, for assisted decoding."""
        self.can_go_back = True
        self.keep()

    def reset(self) -> None:
        """As it was before the first token."""
        self.states: list[State] | None = None
        self.num_tokens = 0
        # The states before the tokens that can be taken back, how many tokens they have seen, and these tokens.
        self.kept: tuple[list[State] | None, int] = (None, 0)
        self.since: list[tuple[Tensor, Tensor | None]] = []
        # Tokens to be read again, with their mask.
        self.again: tuple[Tensor, Tensor | None] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.num_tokens + (0 if self.again is None else self.again[0].size(1))

    def parts(self, x: Tensor, mask: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        """What is read for the embeddings x (b, n, d) and their mask (b, n), one part after the other."""
        if self.again is not None:
            x, mask = joined([self.again, (x, mask)])
        first = x.size(1) - self.most_back
        if not self.can_go_back or first <= 0:
            return [(x, mask)]
        return [(x[:, part], None if mask is None else mask[:, part]) for part in (slice(first), slice(first, None))]

    def update(self, states: list[State], x: Tensor, mask: Tensor | None, *, is_kept: bool = False) -> None:
        """Take the states behind a part. ``is_kept``: ``crop`` need not return to a token before the end of it."""
        self.states, self.num_tokens, self.again = states, self.num_tokens + x.size(1), None
        if is_kept:
            self.keep()
        elif self.can_go_back:
            self.since.append((x, mask))

    def keep(self) -> None:
        """Take none of the tokens so far back."""
        if self.can_go_back:
            self.kept, self.since = (self.states, self.num_tokens), []

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, -1 of them or -2 and so on; those before them are then never taken back.

        ValueError where they are not kept.
        """
        if self.again is not None:
            self.since = [self.again]
        elif tokens_to_remove == 0:
            self.keep()
            return
        x, mask = joined(self.since) if self.since else (torch.empty(0, 0), None)
        stay = x.size(1) + tokens_to_remove
        if tokens_to_remove > 0 or stay < 0:
            kept = f"the last {x.size(1)}" if self.can_go_back else "none; call activate_past_recording() before"
            raise ValueError(f"crop({tokens_to_remove}) needs tokens to take back: the cache has {kept}")
        self.states, self.num_tokens = self.kept
        self.since = []
        self.again = (x[:, :stay], None if mask is None else mask[:, :stay]) if stay else None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with the rows ``beam_idx``, for beam search."""
        if self.states is not None:
            self.states = [{name: x.index_select(0, beam_idx) for name, x in state.items()} for state in self.states]
        self.keep()

    def state_bytes(self) -> int:
        """Memory that the states hold."""
        return sum(x.numel() * x.element_size() for state in self.states or () for x in state.values())


def joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Consecutive embeddings (b, n, d) and their masks (b, n), as one; None: all tokens are real."""
    x = torch.cat([part for part, _ in parts], dim=1)
    if all(mask is None for _, mask in parts):
        return x, None
    masks = [part.new_ones(part.shape[:2], dtype=torch.bool) if mask is None else mask for part, mask in parts]
    return x, torch.cat(masks, dim=1)


class LightscalePreTrainedModel(PreTrainedModel):
    """What the classes that are loaded share; rows are one document each."""

    config_class = LightscaleConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    # Layers of softmax attention call scaled_dot_product_attention wherever it has their formula.
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    # Multiplied by positions, applied thousands of times, or few and fp32 in training.
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [
        *("theta", "decay_logit", "log_rate", "table", "A_log", "dt_bias", "o_norm", "sinks")
    ]

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
            if isinstance(module, Norm) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, PatchMap) and module.leading is not None:
            nn.init.normal_(module.leading, std=std)
        elif isinstance(module, BoundTable):
            nn.init.ones_(module.table)
        elif isinstance(module, ToeplitzEncoding):
            num_modes, axes = module.decay_logit.size(-1), 1 if self.config.image is None else 2
            scales = torch.logspace(0, math.log10(4096), num_modes, dtype=torch.float64)
            module.decay_logit.copy_(torch.logit(torch.exp(-1 / scales)))
            if module.gamma is not None:
                nn.init.normal_(module.gamma, std=std / math.sqrt(num_modes * axes))
        elif isinstance(module, (TNLMixer, LightNetMixer)) and module.theta is not None:
            heads, width = module.theta.shape
            module.theta.copy_(wavelengths(heads, width, axes=1 if self.config.image is None else 2))
        elif isinstance(module, (DecayMixer, DeltaNetMixer)):
            module.begin()
        elif isinstance(module, CosFormer2Mixer):
            of_head = wavelengths(1, module.theta.size(1), axes=1 if self.config.image is None else 2)
            module.theta.copy_(of_head.expand_as(module.theta))


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


class RecomputedLayers:
    """Gradient checkpointing of a ``Decoder``, before which it stands among the base classes."""

    # transformers sets them.
    gradient_checkpointing = False
    training: bool
    _gradient_checkpointing_func: Callable[..., Any]

    def layer_output(
        self, layer: nn.Module, x: Tensor, state: State | None, mask: Tensor | None, **of_model: Tensor
    ) -> tuple[Tensor, State]:
        """As ``Decoder``; with gradient checkpointing it is computed a second time in the backward pass."""
        if not (self.gradient_checkpointing and self.training):
            found: tuple[Tensor, State] = super().layer_output(layer, x, state, mask, **of_model)  # type: ignore[misc]
            return found

        def again(x: Tensor, state: State | None, mask: Tensor | None, *of_model_: Tensor) -> tuple[Tensor, State]:
            found: tuple[Tensor, State] = layer(x, state, mask, **dict(zip(of_model, of_model_, strict=True)))
            return found

        # Tensors are arguments: what a closure has gets no gradient from the form that is called reentrant.
        recomputed: tuple[Tensor, State] = self._gradient_checkpointing_func(again, x, state, mask, *of_model.values())
        return recomputed


class LightscaleModel(RecomputedLayers, Decoder, LightscalePreTrainedModel):
    """Token ids to activations behind the last norm."""

    # Of transformers.
    config: LightscaleConfig
    post_init: Callable[[], None]

    def __init__(self, config: LightscaleConfig) -> None:
        super().__init__(config.shape(), config)
        self.has_states = not config.shape().reads_both_ways()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cache: StateCache | None = None,
        **more: Any,
    ) -> BaseModelOutputWithPast:
        """Activations (b, n, d).

        Args:
            input_ids: (b, n), or ``inputs_embeds`` (b, n, d).
            attention_mask: (b, n), or (b, tokens so far), 1 for real tokens; padding may stand anywhere.
            past_key_values: what the call before gave, ``StateCache``.
            use_cache: give ``past_key_values``; None: in evaluation, where no layer reads both ways.
            output_hidden_states: give ``hidden_states``: the input of each layer, and the activations behind the norm.
            output_attentions: refused with a ValueError, since no mixer has a matrix of weights.
            cache: the name of ``past_key_values`` from transformers 5.24 on.
            more: not read. Positions are not taken: they follow from the mask.
        """
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions: the layers have no attention weights; leave it out")
        x, mask = given_tokens(input_ids, inputs_embeds, attention_mask)
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = cache is not None or (self.has_states and not self.training)
        with_trace = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if not x.is_floating_point():
            x = self.embed_tokens(x)
        if use_cache and cache is None:
            cache = StateCache()
        states = None if cache is None else cache.states
        parts = [(x, mask)] if cache is None else cache.parts(x, mask)
        found: list[list[Tensor]] = []
        for number, (part, real) in enumerate(parts):
            trace: list[Tensor] = []
            hidden, states = super().forward(part, states, real, trace if with_trace else None)
            found.append([hidden, *trace])
            if use_cache and cache is not None:
                cache.update(states, part, real, is_kept=number < len(parts) - 1)
        hidden, *traced = (last_tokens(of_parts, x.size(1)) for of_parts in zip(*found, strict=True))
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache if use_cache else None,
            hidden_states=tuple(traced) if with_trace else None,
        )


def last_tokens(parts: Sequence[Tensor], n: int) -> Tensor:
    """The last n tokens of consecutive activations (b, …, d): those before them were read again."""
    x = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
    return x if x.size(1) == n else x[:, -n:]


class LightscaleForCausalLM(LightscalePreTrainedModel, GenerationMixin):
    """Token ids to logits of the next token."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LightscaleConfig) -> None:
        super().__init__(config)
        self.model = LightscaleModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: str, *sizes: int
    ) -> None:
        """Give a new text a cache; candidates of an assistant, and those of what assists, are taken back from it."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *sizes)
        name = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
        if generation_config.use_cache is not False and model_kwargs.get(name) is None:
            model_kwargs[name] = cache = StateCache()
            if generation_config.is_assistant or generation_mode == GenerationMode.ASSISTED_GENERATION:
                cache.activate_past_recording()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: StateCache | None = None,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and with ``labels`` (b, n), which are shifted here, their loss.

        Args:
            input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, cache: see ``LightscaleModel``.
            labels: (b, n), -100 where none counts.
            logits_to_keep: how many of the last tokens' logits, or their places; 0: all.
            more: for ``LightscaleModel``, and for the loss.
        """
        cache = past_key_values if cache is None else cache
        read = self.model(input_ids, attention_mask, cache, inputs_embeds, use_cache, **more, return_dict=True)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = soft_capped(self.lm_head(read.last_hidden_state[:, kept]), self.config.final_logit_cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **more)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=read.past_key_values, hidden_states=read.hidden_states
        )


class LightscaleForMaskedLM(LightscalePreTrainedModel):
    """Token ids, some of them the mask, to logits of what was there."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LightscaleConfig) -> None:
        super().__init__(config)
        self.model = LightscaleModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **more: Any,
    ) -> MaskedLMOutput:
        """Logits (b, n, V), of the mask, the last id, as good as minus infinity; with ``labels`` their loss.

        Args:
            input_ids, attention_mask, inputs_embeds: see ``LightscaleModel``.
            labels: (b, n), -100 where nothing was hidden.
            more: for ``LightscaleModel``, and for the loss.
        """
        read = self.model(input_ids, attention_mask, None, inputs_embeds, False, **more, return_dict=True)
        logits = soft_capped(self.lm_head(read.last_hidden_state), self.config.final_logit_cap)
        logits = F.pad(logits[..., :-1], (0, 1), value=torch.finfo(logits.dtype).min)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **more)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=read.hidden_states)


class LightscaleForSequenceClassification(LightscalePreTrainedModel):
    """Token ids to logits of the row's label."""

    def __init__(self, config: LightscaleConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = LightscaleModel(config)
        self.score = LabelScores(config.hidden_size, config.num_labels, bias=config.head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **more: Any,
    ) -> SequenceClassifierOutput:
        """Logits (b, labels), fp32 at least, and with ``labels`` their loss; see ``LightscaleForMaskedLM``.

        ``labels``: (b,) int64; for several labels of a row (b, labels), for a regression (b,) or (b, labels), float.
        """
        mask = given_tokens(input_ids, inputs_embeds, attention_mask)[1]
        read = self.model(input_ids, attention_mask, None, inputs_embeds, False, **more, return_dict=True)
        logits = self.score(pooled(read.last_hidden_state, mask, self.config.pooling))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=read.hidden_states)
