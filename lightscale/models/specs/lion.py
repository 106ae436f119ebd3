"""LION's token mixers; see ``mixers/lion.py``."""

from lightscale.config.model import ModelConfig
from lightscale.kernels.operators import get_operator
from lightscale.models.specs.interface import MixerSpec, ParameterRows, Shapes, projection_flops, rows_by_head
from lightscale.models.specs.options import LionOptions, LionSOptions


class LionLITSpec(MixerSpec):
    """Four projections, no gate, no positions."""

    operator = "lion"
    whole_on_tensor_ranks = frozenset({"out_proj.bias"})

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Projections, and by an option their biases."""
        d, bias = model.hidden_size, lion_options(model, layer).attention_bias
        shapes: Shapes = {"kv_proj.weight": (2 * d, d), "q_proj.weight": (d, d), "out_proj.weight": (d, d)}
        if bias != "none":
            shapes |= {"kv_proj.bias": (2 * d,), "q_proj.bias": (d,)}
        return shapes | {"out_proj.bias": (d,)} if bias == "all" else shapes

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Keys and values stand in one matrix; roles of biases are called after those of the weights: ``q_bias``, …"""
        found: dict[str, ParameterRows] = {}
        bias = lion_options(model, layer).attention_bias
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            if suffix and bias == "none":
                continue
            keys, values = (rows_by_head(f"kv_proj.{kind}", n, model.num_heads, model.head_dim) for n in (0, 1))
            found |= {f"q{suffix}": ParameterRows(parameter=f"q_proj.{kind}"), f"k{suffix}": keys, f"v{suffix}": values}
            if not suffix or bias == "all":
                found[f"o{suffix}"] = ParameterRows(parameter=f"out_proj.{kind}")
        return found

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections; one full product in the chunk for both directions, and two states: 2 C (k + w) + 8 k w.

        w is the values' width with the normaliser's column.
        """
        k, w = model.head_dim, value_width(model, layer)
        chunk = min(get_operator(LionLITSpec.operator).chunk_size, sequence_length)
        orders = num_orders(model, layer)
        return projection_flops(model) + orders * model.num_heads * (2 * chunk * (k + w) + 8 * k * w)

    @staticmethod
    def norms_output(model: ModelConfig, layer: int) -> bool:
        """Scaled outputs are means of values."""
        return not lion_options(model, layer).scale

    @staticmethod
    def fp32_values(model: ModelConfig, layer: int) -> int:
        """The sums of scores."""
        return model.num_heads * lion_options(model, layer).scale * (num_orders(model, layer) == 1)

    @staticmethod
    def more_kept_values(model: ModelConfig, layer: int) -> int:
        """In two orders: queries, keys, and values with their sums, each once more for every order; their outputs."""
        if num_orders(model, layer) == 1:
            return 0
        return 2 * model.num_heads * (2 * model.head_dim + value_width(model, layer)) + 2 * model.num_heads

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """A prefix, a suffix and a decay per head forward, both states' cotangents backward."""
        states, orders = 2 * model.hidden_size * value_width(model, layer), num_orders(model, layer)
        return orders * (states + model.num_heads), orders * states

    @staticmethod
    def num_exchanges(model: ModelConfig, layer: int) -> int:
        """One for each order."""
        return num_orders(model, layer)


class LionRetNetSpec(LionLITSpec):
    """Its decays are no parameters."""


class LionSSpec(LionLITSpec):
    """A decay per head and token, or per channel of its values, which is projected from the input."""

    @classmethod
    def layer_operator(cls, model: ModelConfig, layer: int) -> str:
        """The vector gate's is another."""
        return "lion_vector" if lion_s_options(model, layer).vector_decay else cls.operator

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Projections, one of them to the decays, with a bias."""
        decays, d = num_decays(model, layer), model.hidden_size
        own: Shapes = {"forget_proj.weight": (decays, d), "forget_proj.bias": (decays,)}
        return {**LionLITSpec.parameter_shapes(model, layer), **own}

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """With those of the decays."""
        forget = {"forget": "forget_proj.weight", "forget_bias": "forget_proj.bias"}
        roles = LionLITSpec.roles(model, layer)
        return roles | {role: ParameterRows(parameter=name) for role, name in forget.items()}

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """With the projection to the decays.

        The vector gate's two scans have a product of pairs in the chunk each, 2 C (k + u), and a state, 4 k u, of u
        channels: those of the values, and as many of the normalisers'.
        """
        decays = 2 * num_decays(model, layer) * model.hidden_size
        if not lion_s_options(model, layer).vector_decay:
            return LionLITSpec.forward_flops_per_token(model, layer, sequence_length) + decays
        operator = get_operator(LionSSpec.layer_operator(model, layer))
        k, u = model.head_dim, value_width(model, layer)
        chunk = min(operator.chunk_size, sequence_length)
        heads = num_orders(model, layer) * model.num_heads
        return projection_flops(model) + decays + 2 * heads * (2 * chunk * (k + u) + 4 * k * u)

    @staticmethod
    def fp32_values(model: ModelConfig, layer: int) -> int:
        """With the log decays, and their inputs."""
        if lion_s_options(model, layer).vector_decay:
            return model.hidden_size * (lion_options(model, layer).scale + 3)
        return LionLITSpec.fp32_values(model, layer) + 3 * model.num_heads

    @staticmethod
    def more_kept_values(model: ModelConfig, layer: int) -> int:
        """The inputs of the vector gate's decays are kept in fp32, in place of their projections."""
        in_orders = LionLITSpec.more_kept_values(model, layer)
        return in_orders - (model.hidden_size if lion_s_options(model, layer).vector_decay else 0)

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """A prefix, a suffix and the decays forward, both states' cotangents backward."""
        if not lion_s_options(model, layer).vector_decay:
            return LionLITSpec.exchange_values(model, layer)
        width, orders = value_width(model, layer), num_orders(model, layer)
        states = 2 * model.hidden_size * width
        return orders * (states + model.num_heads * width), orders * states


def lion_options(model: ModelConfig, layer: int) -> LionOptions:
    """Those of layer ``layer`` (from 0), whose mixer is one of LION's."""
    options = model.layer_options(layer)
    assert isinstance(options, LionOptions), type(options)
    return options


def lion_s_options(model: ModelConfig, layer: int) -> LionSOptions:
    """Those of layer ``layer`` (from 0), whose mixer is LION-S."""
    options = model.layer_options(layer)
    assert isinstance(options, LionSOptions), type(options)
    return options


def num_orders(model: ModelConfig, layer: int) -> int:
    """In which the tokens of layer ``layer``, one of LION's, are read."""
    return 1 if lion_options(model, layer).patch_order == "raster" else 2


def num_decays(model: ModelConfig, layer: int) -> int:
    """Of each token in layer ``layer``, which is LION-S: one for each head, or for each of its channels."""
    return model.hidden_size if lion_s_options(model, layer).vector_decay else model.num_heads


def value_width(model: ModelConfig, layer: int) -> int:
    """Columns of a head's state: those of the values, and where outputs are scaled one for the sum of the scores; by
    the vector gate one for that of each."""
    sums = model.head_dim if getattr(lion_options(model, layer), "vector_decay", False) else 1
    return model.head_dim + sums * lion_options(model, layer).scale
