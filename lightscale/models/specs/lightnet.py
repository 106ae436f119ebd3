"""LightNet's token mixer; see ``mixers/lightnet.py``."""

from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.models.specs.gated import GatedMixerSpec, gated_projection_flops
from lightscale.models.specs.interface import ParameterRows, PartSpec, Shapes, chunked_flops
from lightscale.models.specs.options import LightNetOptions
from lightscale.models.specs.tpe import TPESpec


class LightNetSpec(GatedMixerSpec):
    """Every layer rotates queries and keys by fixed or learned angles, unless switched off, which doubles their width.

    Decays with separate weights have a separate exchange too, of log-sums, and the operator ``gla``.
    """

    whole_on_tensor_ranks: ClassVar[frozenset[str]] = frozenset({"gate_down.weight", "decay_down.weight"})

    operator = "lightnet"
    other_operators = ("heads",)
    activated = 1
    """Queries: the operator takes keys as they are projected."""

    shared: ClassVar[tuple[type[PartSpec], ...]] = (TPESpec,)

    @classmethod
    def layer_operator(cls, model: ModelConfig, layer: int) -> str:
        """Over whole documents it is another, without decay that of plain sums, with a decay apart that of HGRN2."""
        options = lightnet_options(model, layer)
        if not options.decay:
            return "lightning"
        if not options.shared_decay:
            return "gla"
        return cls.operator if model.direction(layer) == "causal" else "lightnet_noncausal"

    @classmethod
    def shared_parts(cls, model: ModelConfig, layer: int) -> tuple[type[PartSpec], ...]:
        """The positional encoding, unless switched off."""
        options = model.mixer_options["lightnet"]
        assert isinstance(options, LightNetOptions), type(options)
        return cls.shared if options.tpe else ()

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Those of the gated mixer, learned angles, and a decay's own weights."""
        shapes, options = GatedMixerSpec.parameter_shapes(model, layer), lightnet_options(model, layer)
        if not options.shared_decay:
            rank, d = model.head_dim, model.hidden_size
            shapes |= {"decay_down.weight": (rank, d), "decay_up.weight": (d, rank)}
        return shapes | ({"lrpe.theta": (model.num_heads, model.head_dim)} if options.learned_angles else {})

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Those of the gated mixer, the angles, and the decay's, which no other mixer has."""
        roles, shapes = GatedMixerSpec.roles(model, layer), LightNetSpec.parameter_shapes(model, layer)
        own = {"angles": "lrpe.theta", "decay_down": "decay_down.weight", "decay_up": "decay_up.weight"}
        return roles | {role: ParameterRows(parameter=name) for role, name in own.items() if name in shapes}

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, gate, and attention in chunks; over whole documents one product with all and one of all."""
        key_width = _key_width(model, layer)
        projections = gated_projection_flops(model, layer)
        if not lightnet_options(model, layer).shared_decay:
            projections += 2 * 2 * model.hidden_size * model.head_dim
        if model.direction(layer) != "causal":
            return projections + model.num_heads * 4 * key_width * model.head_dim
        operator = LightNetSpec.layer_operator(model, layer)
        return projections + chunked_flops(
            model, sequence_length, operator=operator, key_width=key_width, axes=_axes(model, layer)
        )

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """z, S and a flag forward, their cotangents backward; both halves of S share z.

        Over whole documents z and S of either side, and the cotangents of S. Without decay as cosFormer2. With a decay
        of its own z and a flag in an exchange ahead, then S and what is left of each of its rows.
        """
        options, state = lightnet_options(model, layer), model.hidden_size * _key_width(model, layer)
        if not options.decay:
            return state + model.num_heads * _axes(model, layer), state
        if not options.shared_decay:
            left = model.num_heads * _key_width(model, layer)
            return model.hidden_size + 1 + state + left, model.hidden_size + state
        values = state + model.hidden_size
        if model.direction(layer) == "causal":
            return values + 1, values
        return 2 * values + 1, 2 * (values - model.hidden_size)

    @staticmethod
    def num_exchanges(model: ModelConfig, layer: int) -> int:
        """Two with a separate decay."""
        return 1 if lightnet_options(model, layer).shared_decay else 2

    @staticmethod
    def more_kept_values(model: ModelConfig, layer: int) -> int:
        """Values and outputs of further axes; with a separate decay its inputs, and the rotated queries and keys."""
        of_axes = 2 * model.hidden_size * (_axes(model, layer) - 1)
        if lightnet_options(model, layer).shared_decay:
            return of_axes
        return of_axes + model.hidden_size + model.head_dim + 2 * model.num_heads * _key_width(model, layer)

    @staticmethod
    def fp32_values(model: ModelConfig, layer: int) -> int:
        """With a separate decay: its logits, their sums, the inputs of a log sigmoid, and the phases."""
        if lightnet_options(model, layer).shared_decay:
            return 0
        return 5 * model.hidden_size

    @staticmethod
    def norms_output(model: ModelConfig, layer: int) -> bool:
        """Unless switched off."""
        return lightnet_options(model, layer).output_norm

    @staticmethod
    def carried_values(model: ModelConfig, layer: int) -> int:
        """z of either side, whose cotangents are known where the tokens are."""
        return 0 if model.direction(layer) == "causal" else 2 * model.hidden_size


def lightnet_options(model: ModelConfig, layer: int) -> LightNetOptions:
    """Those of layer ``layer`` (from 0), whose mixer is LightNet."""
    options = model.layer_options(layer)
    assert isinstance(options, LightNetOptions), type(options)
    return options


def _axes(model: ModelConfig, layer: int) -> int:
    return model.axes if lightnet_options(model, layer).lrpe else 1


def _key_width(model: ModelConfig, layer: int) -> int:
    return 2 * model.head_dim if lightnet_options(model, layer).lrpe else model.head_dim
