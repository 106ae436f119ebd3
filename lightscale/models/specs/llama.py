"""LLaMA's token mixer; see ``mixers/llama.py``."""

from math import prod
from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.models.specs.interface import MixerSpec, ParameterRows, Shapes, rows_by_head
from lightscale.models.specs.options import llama_heads, llama_options

_NORMS = frozenset({"q_norm.weight", "k_norm.weight"})


class LLaMASpec(MixerSpec):
    """Its state, all keys and values, grows: no state of constant size is exchanged."""

    operator = "SDPA"
    other_operators = ("heads",)
    has_logits: ClassVar[bool] = True
    whole_on_tensor_ranks: ClassVar[frozenset[str]] = frozenset({"out_proj.bias"})

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, and two products with all tokens; where it is causal with half of them, or those of a window."""
        shapes = LLaMASpec.parameter_shapes(model, layer)
        projections = sum(2 * prod(shape) for name, shape in shapes.items() if name.endswith("_proj.weight"))
        options = llama_options(model, layer)
        window = min(options.window or sequence_length, sequence_length)
        seen = window - window**2 / (2 * sequence_length) if options.causal else sequence_length
        return projections + 4 * model.num_heads * llama_heads(model, layer)[1] * seen

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Projections; biases and norms where the options have them."""
        d, options = model.hidden_size, llama_options(model, layer)
        bias = options.attention_bias
        heads, head_dim = llama_heads(model, layer)
        both, width = 2 * heads * head_dim, model.num_heads * head_dim
        rows = 2 * width if options.output_gate else width
        shapes: Shapes = {"kv_proj.weight": (both, d), "q_proj.weight": (rows, d), "out_proj.weight": (d, width)}
        if bias != "none":
            shapes |= {"kv_proj.bias": (both,), "q_proj.bias": (rows,)}
        if options.attention_sinks:
            shapes["sinks.logit"] = (model.num_heads,)
        if options.qk_norm != "none":
            of_q, of_k = (width, both // 2) if options.qk_norm == "all" else (head_dim, head_dim)
            shapes |= {"q_norm.weight": (of_q,), "k_norm.weight": (of_k,)}
        return shapes | {"out_proj.bias": (d,)} if bias == "all" else shapes

    @classmethod
    def whole_parameters(cls, model: ModelConfig, layer: int) -> frozenset[str]:
        """The bias of outputs, and weights that all heads share."""
        shared = llama_options(model, layer).qk_norm == "head"
        return cls.whole_on_tensor_ranks | (_NORMS if shared else frozenset())

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Keys and values stand in one matrix, queries and gates in another, head by head.

        Roles of biases are called after those of the weights: ``q_bias``, …
        """
        heads, head_dim = llama_heads(model, layer)
        has_gate = llama_options(model, layer).output_gate
        found: dict[str, ParameterRows] = {}
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            keys, values = (rows_by_head(f"kv_proj.{kind}", place, heads, head_dim) for place in (0, 1))
            found |= {f"q{suffix}": ParameterRows(parameter=f"q_proj.{kind}"), f"k{suffix}": keys, f"v{suffix}": values}
            if has_gate:
                queries, gates = (rows_by_head(f"q_proj.{kind}", n, model.num_heads, head_dim) for n in (0, 1))
                found |= {f"q{suffix}": queries, f"gate{suffix}": gates}
            found[f"o{suffix}"] = ParameterRows(parameter=f"out_proj.{kind}")
        found |= {role: ParameterRows(parameter=f"{role}.weight") for role in ("q_norm", "k_norm")}
        found["sinks"] = ParameterRows(parameter="sinks.logit")
        shapes = LLaMASpec.parameter_shapes(model, layer)
        return {role: rows for role, rows in found.items() if rows.parameter in shapes}

    @staticmethod
    def norms_output(model: ModelConfig, layer: int) -> bool:
        """Outputs are means of values."""
        return False

    @staticmethod
    def more_kept_values(model: ModelConfig, layer: int) -> int:
        """Of a norm, queries before it; keys before it stay with the values, or are copied by a norm over all heads.

        Of a gate, the output before it.
        """
        heads, head_dim = llama_heads(model, layer)
        options = llama_options(model, layer)
        kept = {"none": 0, "head": model.num_heads, "all": model.num_heads + heads}
        return (kept[options.qk_norm] + model.num_heads * options.output_gate) * head_dim

    @staticmethod
    def joined_values(model: ModelConfig, layer: int) -> int:
        """Queries as projected, beside the values; with a bias they are apart, and those before a norm count anyway."""
        options = llama_options(model, layer)
        is_rotated = options.positions == "rope"
        joins = is_rotated and options.qk_norm == "none" and options.attention_bias == "none"
        return model.num_heads * llama_heads(model, layer)[1] if joins else 0

    @staticmethod
    def fp32_values(model: ModelConfig, layer: int) -> int:
        """What the norms divide by."""
        kept = {"none": 0, "head": model.num_heads + llama_heads(model, layer)[0], "all": 2}
        return kept[llama_options(model, layer).qk_norm]

    @staticmethod
    def gathered_values(model: ModelConfig, layer: int) -> int:
        """Keys and values of all heads."""
        heads, head_dim = llama_heads(model, layer)
        return 2 * heads * head_dim

    @staticmethod
    def query_values(model: ModelConfig, layer: int) -> int:
        """Queries of all heads."""
        return model.num_heads * llama_heads(model, layer)[1]

    @staticmethod
    def key_heads(model: ModelConfig, layer: int) -> int:
        """Those that heads of queries may share."""
        return llama_heads(model, layer)[0]

    @staticmethod
    def window(model: ModelConfig, layer: int) -> int | None:
        """That of the options."""
        return llama_options(model, layer).window
