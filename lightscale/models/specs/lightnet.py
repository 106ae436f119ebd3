"""LightNet's token mixer; see ``mixers/lightnet.py``."""

from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.models.specs.gated import GatedMixerSpec, gated_projection_flops
from lightscale.models.specs.interface import PartSpec, chunked_flops
from lightscale.models.specs.options import LightNetOptions
from lightscale.models.specs.tpe import TPESpec


class LightNetSpec(GatedMixerSpec):
    """Every layer rotates queries and keys by fixed angles, unless switched off, which doubles their width."""

    operator = "lightnet"
    activated = 1
    """Queries: the operator takes keys as they are projected."""

    shared: ClassVar[tuple[type[PartSpec], ...]] = (TPESpec,)

    @classmethod
    def layer_operator(cls, model: ModelConfig, layer: int) -> str:
        """Over whole documents it is another, and without decay that of plain sums."""
        if not lightnet_options(model, layer).decay:
            return "lightning"
        return cls.operator if model.direction(layer) == "causal" else "lightnet_noncausal"

    @classmethod
    def shared_parts(cls, model: ModelConfig, layer: int) -> tuple[type[PartSpec], ...]:
        """The positional encoding, unless switched off."""
        options = model.mixer_options["lightnet"]
        assert isinstance(options, LightNetOptions), type(options)
        return cls.shared if options.tpe else ()

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, gate, and attention in chunks; over whole documents one product with all and one of all."""
        key_width = _key_width(model, layer)
        if model.direction(layer) != "causal":
            return gated_projection_flops(model, layer) + model.num_heads * 4 * key_width * model.head_dim
        operator = LightNetSpec.layer_operator(model, layer)
        attention = chunked_flops(model, sequence_length, operator=operator, key_width=key_width)
        return gated_projection_flops(model, layer) + attention

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """z, S and a flag forward, their cotangents backward; both halves of S share z.

        Over whole documents z and S of either side, and the cotangents of S. Without decay as cosFormer2.
        """
        state = model.hidden_size * _key_width(model, layer)
        if not lightnet_options(model, layer).decay:
            return state + model.num_heads, state
        values = state + model.hidden_size
        if model.direction(layer) == "causal":
            return values + 1, values
        return 2 * values + 1, 2 * (values - model.hidden_size)

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


def _key_width(model: ModelConfig, layer: int) -> int:
    return 2 * model.head_dim if lightnet_options(model, layer).lrpe else model.head_dim
