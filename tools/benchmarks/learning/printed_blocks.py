"""The four models of CausalRN's paper with its own blocks, for the copying task; no part of lightscale's mixers.

("Linear-Time Sequence Modeling with MLPs", appendix B.) All of them add learned positions to the embedding and
normalise by LayerNorm without weights in front of every residual connection. CausalRN's blocks are the mixer alone. A
transformer's block is softmax attention of one head without rotations and a perceptron with biases, a linear
transformer's the attention of Katharopoulos et al. (arXiv 2006.16236) and the same perceptron. Each of the two is a
layer of its own here, so that a block is two layers of ``model.mixer = ["NAME", "perceptron"]`` without a gated linear
unit. The paper does not name the perceptron's activation: GELU, as in GPT. The norm before the output layer is an RMS
norm.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor

from lightscale.config.mixers import MIXERS, MixerEntry
from lightscale.config.model import ModelConfig
from lightscale.config.section import Section, SequenceLength, Width
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.linear import column_parallel, row_parallel
from lightscale.models.layers.norms import layer_norm_split
from lightscale.models.mixers.decay_attention import DecayAttention
from lightscale.models.mixers.interface import Mixer
from lightscale.models.mixers.llama import LLaMA
from lightscale.models.mixers.relation import CausalRN
from lightscale.models.specs.interface import MixerSpec, Shapes
from lightscale.models.specs.positions import LearnedPositionsSpec
from lightscale.parallel.megatron import TransformerConfig


class PerceptronOptions(Section):
    """The options of the perceptron."""

    width: Width
    """Hidden channels."""
    positions: SequenceLength
    """Rows of the table of learned positions."""


class PerceptronSpec(MixerSpec):
    """Two matrices with biases; it asks for the learned positions, too."""

    operator = "glu"
    shared = (LearnedPositionsSpec,)
    whole_on_tensor_ranks = frozenset({"down_proj.bias"})

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Up and down."""
        d, width = model.hidden_size, _width(model, layer)
        return {
            "up_proj.weight": (width, d),
            "up_proj.bias": (width,),
            "down_proj.weight": (d, width),
            "down_proj.bias": (d,),
        }

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Of both matrices."""
        return sum(
            2 * prod(shape) for shape in PerceptronSpec.parameter_shapes(model, layer).values() if len(shape) > 1
        )


def _width(model: ModelConfig, layer: int) -> int:
    options = model.layer_options(layer)
    assert isinstance(options, PerceptronOptions), type(options)
    return options.width


class _Normalised(Mixer):
    """A mixer of LayerNorm of its input. The block's RMS norm before it takes out a scale, as LayerNorm does."""

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n, b, d) -> (n, b, d)."""
        return super().mix(layer_norm_split(x, width=x.size(-1), eps=1e-6), context)  # type: ignore[safe-super]


class Relation(_Normalised, CausalRN):
    """CausalRN in either form."""


class Attention(_Normalised, LLaMA):
    """Softmax attention, by its options without positions."""


class LinearAttention(_Normalised, DecayAttention):
    """Linear attention, by its options."""


class _Perceptron(Mixer):
    """W_2 gelu(W_1 x + b_1) + b_2."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        d, width = model.hidden_size, _width(model, self.layer)
        self.up_proj = column_parallel(config, d, width, std=model.init_std, group=self.group, bias=True)
        self.down_proj = row_parallel(config, width, d, std=self.output_std, group=self.group, bias=True)

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n, b, d) -> (n, b, d)."""
        out: Tensor = self.down_proj(F.gelu(self.up_proj(x)[0]))[0]
        return out


class Perceptron(_Normalised, _Perceptron):
    """The perceptron of LayerNorm of its input."""


_SPECS = "lightscale.models.specs"
_ENTRIES = {
    "relation": MixerEntry(
        cls=f"{__name__}:Relation", spec=f"{_SPECS}.relation:CausalRNSpec", options=f"{_SPECS}.options:CausalRNOptions"
    ),
    "attention": MixerEntry(
        cls=f"{__name__}:Attention", spec=f"{_SPECS}.llama:LLaMASpec", options=f"{_SPECS}.options:LLaMAOptions"
    ),
    "linear-attention": MixerEntry(
        cls=f"{__name__}:LinearAttention",
        spec=f"{_SPECS}.decay_attention:DecayAttentionSpec",
        options=f"{_SPECS}.decay_attention:DecayAttentionOptions",
    ),
    "perceptron": MixerEntry(
        cls=f"{__name__}:Perceptron", spec=f"{__name__}:PerceptronSpec", options=f"{__name__}:PerceptronOptions"
    ),
}


@contextmanager
def printed_blocks() -> Iterator[None]:
    """Within it, ``model.mixer`` can name them."""
    with patch.dict(MIXERS, _ENTRIES):
        yield


def printed_model(name: str, *, length: int, width: int, blocks: int, vocab_size: int) -> ModelConfig:
    """The model called ``name``: "quadratic", "linear" (CausalRN), "transformer" or "linear transformer".

    Args:
        length: positions.
        width: d_e; CausalRN's hidden channels too, a perceptron has four times as many.
        blocks: with one residual connection each, a transformer's with two.
        vocab_size: rows of the embedding.
    """
    perceptron = {"width": 4 * width, "positions": length}
    forms: dict[str, tuple[list[str], dict[str, Any]]] = {
        "quadratic": (["relation"], {"relation": {"form": "quadratic", "positions": length}}),
        "linear": (["relation"], {"relation": {"form": "linear", "positions": length}}),
        "transformer": (
            ["attention", "perceptron"],
            {"attention": {"attention_bias": "all", "positions": "none"}, "perceptron": perceptron},
        ),
        "linear transformer": (
            ["linear-attention", "perceptron"],
            {"linear-attention": {"decay": "none", "feature_map": "elu"}, "perceptron": perceptron},
        ),
    }
    mixer, options = forms[name]
    return ModelConfig.model_validate(
        {
            "mixer": mixer,
            "num_layers": blocks * len(mixer),
            "hidden_size": width,
            "num_heads": 1,
            "intermediate_size": 0,
            "vocab_size": vocab_size,
            "tie_word_embeddings": False,
            "norm": "srmsnorm",
            "embedding_std": 1.0,
            "mixer_options": options,
        }
    )
