"""TransNormerLLM's token mixer; see ``mixers/tnl.py``."""

from lightscale.config.model import ModelConfig
from lightscale.models.specs.gated import GatedMixerSpec, gated_projection_flops
from lightscale.models.specs.interface import ParameterRows, Shapes, chunked_flops, num_scans
from lightscale.models.specs.options import TNLOptions


class TNLSpec(GatedMixerSpec):
    """Some layers, usually the first, rotate queries and keys by learned angles, which doubles their width."""

    operator = "lightning"
    other_operators = ("heads",)

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, gate, and attention in chunks, of each scan."""
        width, axes = _key_width(model, layer), _axes(model, layer)
        chunks = chunked_flops(model, sequence_length, operator=TNLSpec.operator, key_width=width, axes=axes)
        return gated_projection_flops(model, layer) + num_scans(model, layer) * chunks

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Those of the gated mixer, and the angles of a layer that has them."""
        shapes = GatedMixerSpec.parameter_shapes(model, layer)
        return {**shapes, "lrpe.theta": (model.num_heads, model.head_dim)} if tnl_rotates(model, layer) else shapes

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Those of the gated mixer, and the angles of a layer that has them."""
        roles = GatedMixerSpec.roles(model, layer)
        return {**roles, "angles": ParameterRows(parameter="lrpe.theta")} if tnl_rotates(model, layer) else roles

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """A state of each scan and a decay per head and axis forward, the states' cotangents backward."""
        states = num_scans(model, layer) * _key_width(model, layer) * model.head_dim
        return model.num_heads * (states + _axes(model, layer)), model.num_heads * states

    @staticmethod
    def more_kept_values(model: ModelConfig, layer: int) -> int:
        """Values and outputs of further axes."""
        return 2 * model.hidden_size * (_axes(model, layer) - 1)


def tnl_options(model: ModelConfig, layer: int) -> TNLOptions:
    """Those of layer ``layer`` (from 0), whose mixer is TNL."""
    options = model.layer_options(layer)
    assert isinstance(options, TNLOptions), type(options)
    return options


def tnl_rotates(model: ModelConfig, layer: int) -> bool:
    """Whether layer ``layer`` (from 0) rotates its queries and keys."""
    where = tnl_options(model, layer).lrpe
    return where == "all" or (where == "first" and layer == 0)


def _axes(model: ModelConfig, layer: int) -> int:
    return model.axes if tnl_rotates(model, layer) else 1


def _key_width(model: ModelConfig, layer: int) -> int:
    return 2 * model.head_dim if tnl_rotates(model, layer) else model.head_dim
