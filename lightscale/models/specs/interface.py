"""Facts about a mixer or shared part before it is built: parameters, operations, exchanged values.

Imports neither torch nor Megatron: ``lightscale plan`` counts from this alone, and the modules that are built read
their shapes and names here. A spec is a class of static methods; nothing is kept in it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.kernels.operators import get_operator

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class PartParameter:
    """A parameter of a shared part."""

    shape: tuple[int, ...]
    """Unsplit."""
    term: str
    """Its term in the counts of ``lightscale plan``."""
    split_dim: int | None = None
    """The dim that tensor ranks share out; None: each of them holds the whole parameter."""
    keep_wide: bool = False
    """Kept in fp32 in half-precision models."""
    weight_decay: bool = True
    """False: none for this parameter, whatever its shape."""


@dataclass(frozen=True, kw_only=True)
class PartExchange:
    """Values that a part sends in an exchange along the sequence: fp32 numbers per row, of all tensor ranks."""

    channels: int
    """By which the state is shared out, over tensor ranks and for some ways of exchange."""
    state: int
    """Numbers of the state; as many come back as its cotangent."""
    whole: int
    """Decays that every tensor rank needs and sends, forward only."""


class PartSpec(ABC):
    """A part of the model outside the layers, held once because a mixer asks for it: see ``MixerSpec.shared``.

    A part is either an ``EmbeddingPartSpec`` or a ``StagePartSpec``.
    """

    name: ClassVar[str]
    """Its module's name, which begins the names of its parameters, and its key in ``SequenceContext.shared``."""
    implementation: ClassVar[str]
    """MODULE:CLASS of its ``SharedPart``. A name and no import, so that the spec is read without torch."""
    operator: ClassVar[str | None] = None
    """The operator (``lightscale.kernels.operators``) that computes it; None: PyTorch."""

    @staticmethod
    @abstractmethod
    def parameters_of(model: ModelConfig) -> dict[str, PartParameter]:
        """The part's parameters by their names in the module."""

    @staticmethod  # noqa: B027 - most parts fit every model
    def check(model: ModelConfig) -> None:
        """Raise ``UserError`` for a model that cannot have the part, with key, value and remedy."""

    @staticmethod
    def forward_flops_per_token(model: ModelConfig) -> float:
        """Operations of one forward pass, per token."""
        return 0.0

    @staticmethod
    def exchange_values(model: ModelConfig) -> PartExchange | None:
        """Values that the part exchanges with other sequence ranks; None: it has no state."""
        return None

    @classmethod
    def prefix(cls) -> str:
        """Prefix of the names of the part's parameters in the model, including the dot."""
        return f"{cls.name}."


class EmbeddingPartSpec(PartSpec):
    """A part that changes the embedded tokens, on the first pipeline stage only."""

    @classmethod
    def prefix(cls) -> str:
        """It is a module of the embedding."""
        return f"embedding.{cls.name}."


class StagePartSpec(PartSpec):
    """A part that layers of every pipeline stage read: each stage has a copy."""


@dataclass(frozen=True, kw_only=True)
class ParameterRows:
    """Rows of a parameter of a mixer, in the order of ``ranges``."""

    parameter: str
    ranges: tuple[tuple[int, int], ...] | None = None
    """First and last + 1 of each; None: the whole parameter, whatever its dims."""


class MixerSpec(ABC):
    """A token mixer. Its class is named beside it, in a ``MixerEntry`` (``lightscale.config.mixers``)."""

    operator: ClassVar[str]
    """Name of its operator in ``kernels.operators``."""
    other_operators: ClassVar[tuple[str, ...]] = ()
    """Names of the operators that it uses beside ``operator``, without a state."""

    shared: ClassVar[tuple[type[PartSpec], ...]] = ()
    """Parts that the model holds once for all layers of this kind."""

    has_logits: ClassVar[bool] = False
    """Whether scores of queries and keys go through a softmax: the mixer then has a ``HeadMaxima``, ``maxima``."""

    activated: ClassVar[int] = 2
    """Number of queries and keys (0 to 2) that the backward pass keeps also behind an activation."""

    @classmethod
    def layer_operator(cls, model: ModelConfig, layer: int) -> str:
        """Operator of layer ``layer`` (from 0), for mixers with a choice of operators."""
        return cls.operator

    @classmethod
    def shared_parts(cls, model: ModelConfig, layer: int) -> tuple[type[PartSpec], ...]:
        """Shared parts of layer ``layer`` (from 0), for mixers whose options select them."""
        return cls.shared

    whole_on_tensor_ranks: ClassVar[frozenset[str]] = frozenset()
    """Names of the parameters that tensor ranks do not split: each of them holds them whole."""

    @classmethod
    def whole_parameters(cls, model: ModelConfig, layer: int) -> frozenset[str]:
        """Those of layer ``layer`` (from 0), for mixers whose options select them."""
        return cls.whole_on_tensor_ranks

    @staticmethod
    @abstractmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Unsplit shapes of the parameters of layer ``layer`` (from 0), by their names in the module."""

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Roles of the parameters of layer ``layer`` (from 0); a mixer that replaces another keeps weights by role.

        ``q``, ``k`` and ``v`` are the projections to queries, keys and values, ``o`` that of the output. ``forget`` is
        the projection to decays, ``gate_down`` and ``gate_up`` belong to the output gate, ``angles`` to LRPE. A mixer
        can define other roles. Parameters without a role are initialized again. Roles do not share rows.
        """
        return {}

    @staticmethod
    @abstractmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Operations of the matrix products in one forward pass of layer ``layer`` (from 0), per token."""

    @staticmethod
    def norms_output(model: ModelConfig, layer: int) -> bool:
        """Whether a norm over all heads stands between operator and output projection."""
        return True

    @staticmethod
    def kept_values(model: ModelConfig, layer: int) -> int | None:
        """Numbers per token that the mixer keeps for its backward pass in the precision of the weights.

        None: its projections, activated queries and keys, its output before and behind the norm, and
        ``more_kept_values``.
        """
        return None

    @staticmethod
    def more_kept_values(model: ModelConfig, layer: int) -> int:
        """Further numbers per token, in the weights' precision, that the mixer keeps for the backward pass."""
        return 0

    @staticmethod
    def joined_values(model: ModelConfig, layer: int) -> int:
        """Further numbers per token that stay only because projections of one input are one product.

        They are apart across sequence ranks (``layers/projections.py``).
        """
        return 0

    @staticmethod
    def fp32_values(model: ModelConfig, layer: int) -> int:
        """Numbers per token that a layer keeps for its backward pass in fp32, whatever the weights' precision."""
        return 0

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """fp32 numbers per row that each sequence rank contributes to an exchange, forward and backward."""
        return 0, 0

    @staticmethod
    def num_exchanges(model: ModelConfig, layer: int) -> int:
        """Number of consecutive exchanges in which a pass sends these numbers."""
        return 1

    @staticmethod
    def state_heads(model: ModelConfig, layer: int) -> int:
        """Parts of a state that belong to one tensor rank each, and that ranks of a node share out between them."""
        return model.num_heads

    @staticmethod
    def carried_values(model: ModelConfig, layer: int) -> int:
        """Those of the forward numbers that belong to the state but have no cotangent, in a ring handed on with it."""
        return 0

    @staticmethod
    def tail_values(model: ModelConfig, layer: int) -> int:
        """Numbers per row, in the weights' precision, that each sequence rank contributes of its last tokens.

        For operators that read a few earlier tokens beside the state, such as a short convolution. As many numbers come
        back. 0: none.
        """
        return 0

    @staticmethod
    def gathered_values(model: ModelConfig, layer: int) -> int:
        """Numbers per token that sequence ranks gather where the state is the tokens themselves: keys and values."""
        return 2 * model.hidden_size

    @staticmethod
    def query_values(model: ModelConfig, layer: int) -> int:
        """Numbers per token of queries that meet keys of other sequence ranks by `parallel.attention`; 0: none do."""
        return 0

    @staticmethod
    def key_heads(model: ModelConfig, layer: int) -> int:
        """Heads of keys and values."""
        return model.num_heads

    @staticmethod
    def window(model: ModelConfig, layer: int) -> int | None:
        """Most tokens that a token reads, the last of them itself; None: all."""
        return None


def rows_by_head(parameter: str, place: int, num_heads: int, head_dim: int) -> ParameterRows:
    """Of two matrices whose rows alternate head by head in ``parameter``, the first (``place`` 0) or the second (1)."""
    starts = ((2 * head + place) * head_dim for head in range(num_heads))
    return ParameterRows(parameter=parameter, ranges=tuple((start, start + head_dim) for start in starts))


def num_scans(model: ModelConfig, layer: int) -> int:
    """Of a mixer with a state that reads documents in each direction by itself: one, or two."""
    return 1 if model.direction(layer) == "causal" else 2


def projection_flops(model: ModelConfig) -> float:
    """Operations of the four projections of one mixer's forward pass, per token."""
    return 2 * 4 * model.hidden_size**2


def chunked_flops(model: ModelConfig, sequence_length: int, *, operator: str, key_width: int, axes: int = 1) -> float:
    """Operations of chunked linear attention per token: 2 C (k + A v) in the chunk, 4 k v with the state, per head.

    C is the chunk of ``operator``; A the axes that queries and keys are rotated along, each with scores of its own.
    """
    k, v = key_width, model.head_dim
    # The operator's own chunk: the work inside it grows with its length, that with the state does not.
    chunk = min(get_operator(operator).chunk_size, sequence_length)
    return model.num_heads * (2 * chunk * (k + axes * v) + 4 * k * v)
