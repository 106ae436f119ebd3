"""Inputs of predictions: compute, memory and exchanges of a model's layers and stages, in numbers per token."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import get_args

from lightscale.config.model import ModelConfig
from lightscale.config.schema import AdapterConfig, Recompute
from lightscale.errors import UserError
from lightscale.kernels.operators import CostClass, Operator, get_operator
from lightscale.models.accounting import block_norms, parameter_shapes, rank_parameters_by_name
from lightscale.models.adapters import adapted_maps, rank_adapter_parameters
from lightscale.models.flops import linear_unit_flops
from lightscale.models.fp8 import fp8_weights
from lightscale.models.registry import mixer_spec, shared_specs
from lightscale.models.specs.interface import EmbeddingPartSpec
from lightscale.models.stages import layer_stages
from lightscale.planning.exchange_sizes import Summary

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

_FP32_BYTES = 4

# Those that a mixer's operator can have: `Hardware` has a speed for each.
_COSTS = (CostClass.SCAN, CostClass.GATED_SCAN, CostClass.SOFTMAX)


def mixer_operator(model: ModelConfig, layer: int) -> Operator:
    """The operator of layer `layer` (from 0).

    Raises:
        UserError: for an unknown mixer, an operator without description, or a cost class without a speed.
    """
    name = model.layers[layer]
    operator = get_operator(mixer_spec(name).layer_operator(model, layer))
    if operator.cost not in _COSTS:
        able = ", ".join(cost.value for cost in _COSTS)
        raise UserError(
            f"mixer {name!r}: operator {operator.name!r} has cost class {operator.cost.value!r}, whose time cannot be "
            f"predicted; use one of: {able}"
        )
    return operator


def activation_values(model: ModelConfig, layer: int, recompute: Recompute = "none") -> int:
    """Numbers per token that layer `layer` (from 0) keeps for the backward pass; see `memory.assumptions`."""
    d, g = model.hidden_size, model.intermediate_size
    if recompute == "full":
        return d
    mixer = mixer_spec(model.layers[layer])
    # Gate and up, and their product; or what the activation reads, and what it gives.
    glu = 0 if recompute == "selective" else (3 if model.gated_linear_unit else 2) * g
    # Inputs and outputs of the block's norms, as far as they have the weights' dtype.
    norms = (6 if model.norm_placement == "both" else 4) * d - _centered_values(model)
    if model.diffusion is not None:
        # Modulated inputs, and the outputs that gates multiply.
        norms += 4 * d
    own = mixer.kept_values(model, layer)
    if own is not None:
        return norms + own + glu
    weights = mixer.parameter_shapes(model, layer)
    matrices = {name: shape for name, shape in weights.items() if name.endswith(".weight") and len(shape) > 1}
    projected = sum(shape[0] for name, shape in matrices.items() if "out_proj" not in name)
    activated, outputs = mixer.activated * d, 2 * d if mixer.norms_output(model, layer) else d
    if mixer_operator(model, layer).cost is CostClass.SOFTMAX:
        # Queries are as wide as outputs; rotated ones take the place of those that were projected.
        outputs = weights["out_proj.weight"][1] if "out_proj.weight" in weights else d
        activated = mixer.gathered_values(model, layer) // 2
    outputs += mixer.more_kept_values(model, layer) + mixer.joined_values(model, layer)
    return norms + projected + activated + outputs + glu


def _centered_values(model: ModelConfig) -> int:
    """Inputs of a block's LayerNorms less their mean, which take the place of the inputs and are fp32."""
    # Both kinds of blocks have as many.
    norms = sum(name is not None for name in block_norms(model, model.layers[0]))
    # PyTorch's own, with a weight and a bias, keeps its input.
    return norms * model.hidden_size * (model.norm == "layernorm" and not model.norm_elementwise_affine)


def _fp32_values(model: ModelConfig, layer: int, recompute: Recompute) -> int:
    """Inputs of LayerNorm, and what the mixer counts, its decays among it."""
    if recompute == "full":
        return 0
    return mixer_spec(model.layers[layer]).fp32_values(model, layer) + _centered_values(model)


@dataclass(frozen=True, kw_only=True)
class Fp8Work:
    """The products of a layer that take their inputs in 8 bits (``train.fp8``)."""

    flops: float = 0
    """Of a forward pass, per token."""
    glu_flops: float = 0
    """Those in the linear unit."""
    inputs: int = 0
    """Numbers per token that are cast forward."""
    outputs: int = 0
    """Numbers per token whose gradients are cast backward."""
    weights: int = 0
    """Elements of the weights, which are cast in both passes of a micro-batch."""
    kept: tuple[int, ...] = (0,) * len(RECOMPUTE)
    """Inputs that are kept in 8 bits, for each of `RECOMPUTE`."""
    replaced: tuple[int, ...] = (0,) * len(RECOMPUTE)
    """Those that are then not kept in the format of the weights, as nothing else reads them backward."""

    @staticmethod
    def of_layer(model: ModelConfig, layer: int, *, keeps: bool) -> "Fp8Work":
        """`keeps`: whether weights are trained, whose gradients need the inputs."""
        chosen = fp8_weights(model)
        shapes = {
            name.removeprefix(prefix): shape
            for name, shape in parameter_shapes(model).items()
            if name.startswith(prefix := f"decoder.layers.{layer}.") and name.endswith(".weight") and len(shape) == 2
        }
        cast = {name: shape for name, shape in shapes.items() if f"decoder.layers.{layer}.{name}" in chosen}
        # Maps that read the same numbers: what a norm gives.
        readers = {
            name: name if name.endswith(("out_proj.weight", "linear_fc2.weight")) else name.partition(".")[0]
            for name, shape in shapes.items()
            if not name.endswith("_conv.weight") and (name in cast or shape[1] == model.hidden_size)
        }
        read = {readers[name]: cast[name][1] for name in cast}
        only = {key for key in read if all(name in cast for name, own in readers.items() if own == key)}
        if not mixer_spec(model.layers[layer]).norms_output(model, layer):
            # The operator keeps its output.
            only.discard("self_attention.out_proj.weight")
        held = [read, {key: width for key, width in read.items() if not key.startswith("mlp")}, {}]
        return Fp8Work(
            flops=sum(2 * prod(shape) for shape in cast.values()),
            glu_flops=sum(2 * prod(shape) for name, shape in cast.items() if name.startswith("mlp.")),
            inputs=sum(read.values()),
            outputs=sum(shape[0] for shape in cast.values()),
            weights=sum(map(prod, cast.values())),
            kept=tuple(keeps * sum(one.values()) for one in held),
            replaced=tuple(keeps * sum(width for key, width in one.items() if key in only) for one in held),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWork:
    """One layer, per token and for the whole width; FLOPs of a forward pass.

    Equal layers are one object (`Workload.layers`): the search of layouts compares them often.
    """

    mixer_flops: float
    """Matrix products with the mixer's weights: projections and gates."""
    query_flops: float
    """Part of them that runs while states travel: queries and gates."""
    glu_flops: float
    """Matrix products with the GLU's weights."""
    operator_flops: float
    """FLOPs of the operator, between the mixer's projections."""
    fp8: Fp8Work
    """Those of the products that are computed in 8 bits."""
    cost: CostClass
    """Bound of the operator's time."""
    values: tuple[int, ...]
    """Kept activations, for each of `RECOMPUTE`."""
    fp32_values: tuple[int, ...]
    """Kept activations in fp32, in addition."""
    num_column_parallel: int
    """Linear layers that split their output over the tensor ranks, without the gate; two split their input."""
    gate_rank: int
    """Inner width of a low-rank gate; 0: none."""
    norms_output: bool
    """See `MixerSpec.norms_output`."""
    exchange: tuple[int, int] | None
    """See `MixerSpec.exchange_values`; None for a mixer with all tokens as its state."""
    num_exchanges: int
    """See `MixerSpec.num_exchanges`."""
    state_heads: int
    """See `MixerSpec.state_heads`."""
    carried: int
    """See `MixerSpec.carried_values`."""
    tail: int
    """See `MixerSpec.tail_values`."""
    gathered: int
    """See `MixerSpec.gathered_values`; 0 for a mixer with a state of constant size."""
    queries: int
    """See `MixerSpec.query_values`."""
    joined: int
    """See `MixerSpec.joined_values`."""
    key_heads: int
    """See `MixerSpec.key_heads`."""
    window: int | None
    """See `MixerSpec.window`."""
    is_causal: bool
    """Whether tokens see no later tokens."""

    def kept_bytes(self, recompute: Recompute, size: int, *, gathers: bool = False) -> int:
        """Bytes of kept activations, with weights of `size` bytes; `gathers`: from other sequence ranks."""
        kept = RECOMPUTE.index(recompute)
        # Keys and values as projected and rotated keys make way for what was exchanged, which counts as that.
        own = 3 * self.gathered // 2 + self.joined if gathers and recompute != "full" else 0
        values = self.values[kept] - own - self.fp8.replaced[kept]
        return size * values + self.fp8.kept[kept] + _FP32_BYTES * self.fp32_values[kept]

    def backward_bytes(self, size: int, *, attention_bytes: int = 0) -> int:
        """Peak bytes of the backward pass in addition to the activations.

        In the GLU: the gradients of its two halves and of the residual stream; the product's gradient replaces the
        product. Or in attention across ranks, after the release of the GLU's activations: its `attention_bytes`.
        """
        whole, without_glu, stream = self.values
        glu = whole - without_glu
        return max(size * (2 * glu // 3 + stream), attention_bytes - size * glu)

    @property
    def product_flops(self) -> float:
        """All matrix products with weights."""
        return self.mixer_flops + self.glu_flops

    @property
    def has_state(self) -> bool:
        """Whether a state of constant size represents all tokens before."""
        return self.exchange is not None


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """One pipeline stage, as held by each of its tensor ranks."""

    layers: tuple[LayerWork, ...]
    held: Mapping[str, int]
    """Elements of each parameter per rank, by global name."""
    trained: Mapping[str, int]
    """Those that are trained: all of them, or adapters beside them."""
    adapter_values: int
    """Numbers per token, of all tensor ranks, that adapters keep for the backward pass."""
    first: bool
    """Whether it has the embedding and the positional encoding after it."""
    last: bool
    """Whether it has the output layer."""

    @property
    def parameters(self) -> int:
        """Number of parameters per rank, adapters included."""
        return sum({**self.held, **self.trained}.values())

    @property
    def trained_parameters(self) -> int:
        """Number of parameters per rank that are trained."""
        return sum(self.trained.values())

    def recomputed(self, recompute: Recompute, num_layers: int | None) -> tuple[LayerWork, ...]:
        """The layers that `recompute` applies to: the first `num_layers`, or all."""
        return () if recompute == "none" else self.layers[:num_layers]

    @property
    def kind(self) -> tuple[tuple[LayerWork, ...], bool, bool]:
        """Key of its times: most stages in the middle are equal."""
        return self.layers, self.first, self.last


class Workload:
    """A model on sequences of `sequence_length` tokens, with `adapter` beside its weights; None: these are trained.

    `fp8`: whether the linear maps compute in 8 bits.
    """

    def __init__(
        self, model: ModelConfig, sequence_length: int, adapter: AdapterConfig | None = None, *, fp8: bool = False
    ) -> None:
        self.model, self.adapter, self.fp8 = model, adapter, fp8
        self.sequence_length = sequence_length
        self._stages: dict[tuple[int, int], tuple[StageWork, ...]] = {}

    @cached_property
    def layers(self) -> tuple[LayerWork, ...]:
        """Layers, first to last."""
        alike: dict[tuple[object, ...], LayerWork] = {}
        made = [self._layer(layer) for layer in range(self.model.num_layers)]
        return tuple(alike.setdefault(tuple(vars(layer).values()), layer) for layer in made)

    @cached_property
    def embedding_parts(self) -> tuple[type[EmbeddingPartSpec], ...]:
        """Parts after the word embedding, such as a positional encoding."""
        return tuple(part for part in shared_specs(self.model) if issubclass(part, EmbeddingPartSpec))

    @cached_property
    def embedding_part_flops(self) -> float:
        """Forward FLOPs per token of the parts after the embedding; 0 without any."""
        return sum(part.forward_flops_per_token(self.model) for part in self.embedding_parts)

    def summary(self, layer: LayerWork, tensor: int) -> Summary:
        """Summary that each of `tensor` ranks exchanges for `layer`, which has a state."""
        assert layer.exchange is not None
        return Summary.of_mixer(
            layer.state_heads,
            *layer.exchange,
            tensor=tensor,
            carried=layer.carried,
            directions=1 if layer.is_causal else 2,
        )

    def embedding_part_summaries(self, tensor: int) -> dict[str, Summary]:
        """Summaries that each of `tensor` ranks exchanges for parts after the embedding with a state."""
        sent = {part.name: part.exchange_values(self.model) for part in self.embedding_parts}
        return {
            name: Summary(heads=values.channels // tensor, state=values.state // tensor, whole=values.whole)
            for name, values in sent.items()
            if values is not None
        }

    def stages(self, *, tensor: int, pipeline: int) -> tuple[StageWork, ...]:
        """The stages of a layout, first to last."""
        key = tensor, pipeline
        if key not in self._stages:
            held = trained = rank_parameters_by_name(self.model, tensor=tensor, pipeline=pipeline)
            if self.adapter is not None:
                trained = rank_adapter_parameters(self.model, self.adapter, tensor=tensor, pipeline=pipeline)
            self._stages[key] = tuple(
                StageWork(
                    layers=self.layers[layers.start : layers.stop],
                    held=held[stage],
                    trained=trained[stage],
                    adapter_values=self._adapter_values(layers),
                    first=stage == 0,
                    last=stage == pipeline - 1,
                )
                for stage, layers in enumerate(layer_stages(self.model.num_layers, pipeline))
            )
        return self._stages[key]

    def _adapter_values(self, layers: range) -> int:
        """What A gives of each token; of DoRA also both outputs that the factors of rows are taken of."""
        if self.adapter is None:
            return 0
        maps = [one for one in adapted_maps(self.model, self.adapter) if one.layer in layers]
        outputs = 2 * sum(one.width_out for one in maps) if self.adapter.name == "dora" else 0
        # Dropout keeps what an adapter reads, and a byte for each of its numbers: half of one in bf16.
        inputs = 3 * sum(one.width_in for one in maps) // 2 if self.adapter.lora_dropout else 0
        return self.adapter.r * len(maps) + outputs + inputs

    def _layer(self, layer: int) -> LayerWork:
        model = self.model
        mixer, operator = mixer_spec(model.layers[layer]), mixer_operator(model, layer)
        shapes = mixer.parameter_shapes(model, layer)
        matrices = {name: shape for name, shape in shapes.items() if name.endswith(".weight") and len(shape) > 1}
        flops = {weight: 2 * prod(shape) for weight, shape in matrices.items()}
        mixer_flops = sum(flops.values())
        columns = [weight for weight in flops if weight.endswith("_proj.weight") and weight != "out_proj.weight"]
        has_state = operator.state is not None and not operator.state.grows
        return LayerWork(
            mixer_flops=mixer_flops,
            query_flops=sum(count for weight, count in flops.items() if weight.startswith(("q_proj.", "gate_"))),
            glu_flops=linear_unit_flops(model),
            operator_flops=mixer.forward_flops_per_token(model, layer, self.sequence_length) - mixer_flops,
            fp8=Fp8Work.of_layer(model, layer, keeps=self.adapter is None) if self.fp8 else Fp8Work(),
            cost=operator.cost,
            values=tuple(activation_values(model, layer, recompute) for recompute in RECOMPUTE),
            fp32_values=tuple(_fp32_values(model, layer, recompute) for recompute in RECOMPUTE),
            num_column_parallel=len(columns) + 1,
            gate_rank=shapes["gate_down.weight"][0] if "gate_down.weight" in shapes else 0,
            norms_output=mixer.norms_output(model, layer),
            exchange=mixer.exchange_values(model, layer) if has_state else None,
            num_exchanges=mixer.num_exchanges(model, layer),
            state_heads=mixer.state_heads(model, layer),
            carried=mixer.carried_values(model, layer) if has_state else 0,
            tail=mixer.tail_values(model, layer),
            gathered=0 if has_state else mixer.gathered_values(model, layer),
            queries=mixer.query_values(model, layer),
            joined=mixer.joined_values(model, layer),
            key_heads=mixer.key_heads(model, layer),
            # One that is no shorter than the sequence hides nothing.
            window=window
            if (window := mixer.window(model, layer) or self.sequence_length) < self.sequence_length
            else None,
            is_causal=model.direction(layer) == "causal",
        )
