"""Blocks of a mixer and a gated linear unit around the residual stream, and a stage's sequence of them.

    s ← s + mixer(norm(s));  s ← s + glu(norm(s))

A sum and the norm behind it are one pass over the activations, also from one block to the next: between blocks the
stream is the pair (x, added), of which s is the sum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightscale.models.layers.context import SequenceContext
from lightscale.parallel.megatron import IdentityOp, TransformerBlock, TransformerLayer, tensor_parallel

Stream = tuple[Tensor, Tensor | None]
"""The residual stream (n / tensor, b, d), as a sum whose second term may be missing."""


def whole(stream: Stream) -> Tensor:
    """The sum (n / tensor, b, d)."""
    x, added = stream
    return x if added is None else x + added


def _normed(norm: nn.Module, stream: Stream) -> tuple[Tensor, Tensor]:
    """The whole stream, and its norm; the stream itself where ``norm`` is absent."""
    if isinstance(norm, IdentityOp):
        return (x := whole(stream)), x
    x, normed = norm(*stream)
    return x, normed


class DecoderLayer(TransformerLayer):
    """Megatron's layer of a mixer and a gated linear unit, with norms before them, behind them, or both."""

    tell: Callable[[SequenceContext], None] | None = None
    """Takes the context of each pass before the layer's maps compute, also of a pass that is repeated."""

    def mixer_input(self, stream: Stream) -> tuple[Tensor, Any]:
        """The whole stream, and the mixer's input: its norm; with the stream itself for a mixer that ``reads_raw``."""
        x, normed = _normed(self.input_layernorm, stream)
        return x, (normed, x) if getattr(self.self_attention, "reads_raw", False) else normed

    def pair(self, hidden_states: Tensor, added: Tensor | None, context: SequenceContext) -> Stream:
        """The stream behind the block."""
        x, given = self.mixer_input((hidden_states, added))
        mixed, _ = self.self_attention(given, None, packed_seq_params=context)
        added = self._output(self.self_attn_bda, mixed)
        if isinstance(self.mlp, IdentityOp):
            return x, added
        x, normed = _normed(self.pre_mlp_layernorm, (x, added))
        if self.recompute_mlp:
            output, _ = tensor_parallel.checkpoint(partial(self._mlp, context), False, normed)
        else:
            output, _ = self.mlp(normed)
        return x, self._output(self.mlp_bda, output)

    def _mlp(self, context: SequenceContext, normed: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gated linear unit, which backward repeats when other micro-batches have passed."""
        if self.tell is not None:
            self.tell(context)
        output: tuple[Tensor, Tensor | None] = self.mlp(normed, padding_mask=None)
        return output

    @staticmethod
    def _output(post_norm: nn.Module, output: Tensor) -> Tensor:
        normed: Tensor = output if isinstance(post_norm, IdentityOp) else post_norm(output)
        return normed

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: SequenceContext,
        added: Tensor | None = None,
        in_parts: bool = False,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        """The whole stream and None, as Megatron's recomputation calls it; with ``in_parts`` the pair."""
        if self.tell is not None:
            self.tell(packed_seq_params)
        stream = self.pair(hidden_states, added, packed_seq_params)
        return stream if in_parts else (whole(stream), None)


class DecoderLayers(TransformerBlock):
    """Megatron's sequence of a stage's layers, with its recomputation."""

    def forward(
        self, hidden_states: Tensor, attention_mask: None, *, packed_seq_params: SequenceContext, **_: object
    ) -> Tensor:
        """hidden_states: (n / tensor, b, d), of the first stage; others take what the schedule has set."""
        x: Tensor = hidden_states if self.pre_process else self.input_tensor
        if not len(self.layers) and self.final_layernorm is None:
            # Not the stage's own input: the schedule frees what a stage gives.
            return x.clone()
        stream: Stream = x, None
        if self.config.recompute_granularity == "full" and self.training:
            absent = dict.fromkeys(("attention_mask", "context", "context_mask", "rotary_pos_emb", "attention_bias"))
            x = self._checkpointed_forward(
                hidden_states=x,
                **absent,
                packed_seq_params=packed_seq_params,
                use_inner_quantization_context=False,
            )
            stream = x, None
        else:
            for layer in self.layers:
                x, added = stream
                stream = layer(x, packed_seq_params=packed_seq_params, added=added, in_parts=True)
        return whole(stream) if self.final_layernorm is None else _normed(self.final_layernorm, stream)[1]
