"""Types of the fields of config.json that models of all kinds have."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lightscale.config.section import MOST_IDS, MOST_SEQUENCE_TOKENS
from lightscale.exchange.plain.model import Shape

ACTIVATIONS = {"none": "linear", "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Of gated linear units, as transformers names them."""

Width = Annotated[int, Field(ge=1, le=2**20)]
WidthOrZero = Annotated[int, Field(ge=0, le=2**20)]
Ids = Annotated[int, Field(ge=1, le=MOST_IDS)]
Positive = Annotated[float, Field(gt=0, le=1e15)]
Tokens = Annotated[int, Field(ge=1, le=MOST_SEQUENCE_TOKENS)]
Eps = Annotated[float, Field(gt=0, le=100)]
Share = Annotated[float, Field(gt=0, le=1)]


class Known(BaseModel):
    """What every configuration must say; transformers adds keys of its own, which change nothing here."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    vocab_size: Ids
    hidden_size: Width
    num_attention_heads: Width
    intermediate_size: Width
    rms_norm_eps: Eps = 1e-6
    max_position_embeddings: Tokens = 2048


class Exact(BaseModel):
    """A table without unknown keys: an unknown one could change the model."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def shape_of(known: Known, **more: Any) -> Shape:
    """The shape with the sizes of ``known``, and ``more`` of its fields."""
    return Shape(
        vocab_size=known.vocab_size,
        hidden_size=known.hidden_size,
        num_attention_heads=known.num_attention_heads,
        intermediate_size=known.intermediate_size,
        rms_norm_eps=known.rms_norm_eps,
        **more,
    )


def sizes_of(shape: Shape) -> dict[str, Any]:
    """The keys of ``shape`` that models of all kinds have."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": len(shape.mixers),
        "intermediate_size": shape.intermediate_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": shape.tied,
    }
