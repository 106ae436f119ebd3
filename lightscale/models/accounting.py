"""Parameters of a model, counted exactly from its shape alone: nothing is built."""

import re
from collections import Counter
from collections.abc import Collection
from math import prod

from lightscale.config.model import ModelConfig
from lightscale.models.registry import mixer_spec, shared_specs
from lightscale.models.specs.diffusion import TERM as CONDITIONING
from lightscale.models.specs.diffusion import more_shapes
from lightscale.models.specs.interface import PartParameter, Shapes
from lightscale.models.specs.label_head import PREFIX as OF_HEAD
from lightscale.models.specs.label_head import head_shapes
from lightscale.models.specs.options import LLaMAOptions
from lightscale.models.stages import layer_stages

EMBEDDING = "embedding"
"""The term of the embedding, and of an output layer with a separate weight."""
NORM_WEIGHTS = "norm weights"
LRPE_ANGLES = "LRPE angles"
LABEL_HEAD = "label head"
NOISE_OUTPUT = "noise output"

_EMBEDDING_WEIGHT, _OUTPUT_WEIGHT = "embedding.word_embeddings.weight", "output_layer.weight"
# The first that is found in a parameter's name says what it is; shared parts say it themselves.
_TERMS = {
    "word_embeddings.": EMBEDDING,
    "modulation.": CONDITIONING,
    "output_layer.bias": NOISE_OUTPUT,
    _OUTPUT_WEIGHT: EMBEDDING,
    "layernorm.": NORM_WEIGHTS,
    "_norm.": NORM_WEIGHTS,
    ".mlp.": "GLU",
    ".gate_": "gates",
    "_proj.": "projections",
    ".sinks.": "attention sinks",
    "_conv.": "convolutions",
    ".lrpe.theta": LRPE_ANGLES,
}
# Megatron's `make_vocab_size_divisible_by`: rows of a rank that matrix products on GPUs take whole.
_PADDED_ROWS = 128
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_MIXER = re.compile(rf"{_LAYER.pattern}self_attention\.")


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Rows of the embedding that `tensor` ranks hold together, each as many.

    `vocab_size` where the ranks divide it. Otherwise the next multiple of 128 rows a rank, as Megatron has it: those
    beyond `vocab_size` stay zero, take no probability, and are in no checkpoint, so that other layouts resume it.
    """
    multiple = _PADDED_ROWS * tensor
    return vocab_size if vocab_size % tensor == 0 else -(-vocab_size // multiple) * multiple


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Unsplit shape of every parameter by its global name, as in `parallel.initialization.named_parameters`."""
    d, g = model.hidden_size, model.intermediate_size
    shapes: Shapes = {} if model.patches is not None else {_EMBEDDING_WEIGHT: (model.vocab_size, d)}
    shapes |= _of_head(model)
    if model.head is None and not model.tie_word_embeddings and model.diffusion is None:
        shapes[_OUTPUT_WEIGHT] = (model.vocab_size, d)
    shapes |= {name: parameter.shape for name, parameter in _part_parameters(model).items()}
    if model.diffusion is not None:
        shapes |= more_shapes(model)
    of_norm = norm_parameters(model)
    for layer, mixer in enumerate(model.layers):
        block = f"decoder.layers.{layer}"
        own = mixer_spec(mixer).parameter_shapes(model, layer)
        shapes |= {f"{block}.self_attention.{name}": shape for name, shape in own.items()}
        # Gate and up stand in one matrix, as Megatron's gated layers have them.
        inner = 2 * g if model.gated_linear_unit else g
        if g:
            shapes |= {f"{block}.mlp.linear_fc1.weight": (inner, d), f"{block}.mlp.linear_fc2.weight": (d, g)}
        if model.mlp_bias:
            shapes |= {f"{block}.mlp.linear_fc1.bias": (inner,), f"{block}.mlp.linear_fc2.bias": (d,)}
        norms = [norm for norm in block_norms(model, mixer) if norm is not None]
        shapes |= {f"{block}.{norm}.{name}": (d,) for norm in norms for name in of_norm}
    if model.final_norm:
        shapes |= {f"decoder.final_layernorm.{name}": (d,) for name in of_norm}
    return shapes


def _of_head(model: ModelConfig) -> Shapes:
    """Those of the label head; none without one."""
    if model.head is None:
        return {}
    return {f"{OF_HEAD}{name}": shape for name, shape in head_shapes(model.head, model.hidden_size).items()}


def norm_parameters(model: ModelConfig) -> tuple[str, ...]:
    """Names of the parameters, of d numbers each, that the norm of a block has."""
    if model.norm_elementwise_affine:
        return "weight", "bias"
    return ("weight",) if model.norm == "rmsnorm" else ()


def block_norms(model: ModelConfig, mixer: str) -> tuple[str | None, ...]:
    """The norms before and behind ``mixer``, before and behind the gated linear unit, by name; None: there is none."""
    placement = norm_placement(model, mixer)
    has_pre, has_post = placement != "post", placement != "pre"
    before = ("input_layernorm", "pre_mlp_layernorm") if has_pre else (None, None)
    behind = ("self_attn_bda.layernorm", "mlp_bda.layernorm") if has_post else (None, None)
    return (before[0], behind[0], before[1], behind[1])[: 4 if model.intermediate_size else 2]


def norm_placement(model: ModelConfig, mixer: str) -> str:
    """That of a block with ``mixer``: pre, post or both."""
    if model.norm_placement != "by_mixer":
        return model.norm_placement
    return "post" if isinstance(model.layer_options(model.layers.index(mixer)), LLaMAOptions) else "pre"


def parameter_terms(model: ModelConfig) -> dict[str, int]:
    """Number of parameters of each kind, the embedding first; the sum is all that the built model has."""
    terms: Counter[str] = Counter()
    of_parts = _part_parameters(model)
    of_head = _of_head(model)
    for name, shape in parameter_shapes(model).items():
        term = of_parts[name].term if name in of_parts else LABEL_HEAD if name in of_head else _term(name)
        terms[NOISE_OUTPUT if name == _OUTPUT_WEIGHT and model.diffusion is not None else term] += prod(shape)
    return dict(terms)


def _part_parameters(model: ModelConfig) -> dict[str, PartParameter]:
    """Those of the shared parts, by their global names."""
    return {
        f"{part.prefix()}{name}": parameter
        for part in shared_specs(model)
        for name, parameter in part.parameters_of(model).items()
    }


def _term(name: str) -> str:
    # A new mixer's parameter that is none of the known kinds is listed under its own name.
    return next((term for part, term in _TERMS.items() if part in name), _MIXER.sub("", name))


def rank_parameters(model: ModelConfig, *, tensor: int, pipeline: int) -> list[int]:
    """Number of parameters that each tensor rank holds, by its pipeline stage."""
    return [sum(held.values()) for held in rank_parameters_by_name(model, tensor=tensor, pipeline=pipeline)]


def rank_parameters_by_name(model: ModelConfig, *, tensor: int, pipeline: int) -> list[dict[str, int]]:
    """Elements of each parameter that each tensor rank holds, by its pipeline stage.

    Where they are tied, the last stage of several holds a second copy of the embedding, for the output layer.
    """
    stages = layer_stages(model.num_layers, pipeline)
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    held: list[dict[str, int]] = [{} for _ in range(pipeline)]
    whole = _whole_on_tensor_ranks(model)
    tied = model.ties_weights
    for name, shape in parameter_shapes(model).items():
        # Norms see whole tokens, of which every tensor rank has some: each holds the whole weight.
        ranks = 1 if name in whole or "layernorm." in name else tensor
        if ranks > 1 and name in (_EMBEDDING_WEIGHT, _OUTPUT_WEIGHT):
            shape = padded_vocab_size(shape[0], tensor), *shape[1:]
        for stage in _stages(name, stage_of, last=pipeline - 1, tied=tied):
            held[stage][name] = prod(shape) // ranks
    return held


def _whole_on_tensor_ranks(model: ModelConfig) -> set[str]:
    """Global names of the parameters that tensor ranks do not split, of mixers and parts; norms are others."""
    whole = {name for name, parameter in _part_parameters(model).items() if parameter.split_dim is None}
    whole |= _of_head(model).keys()
    if model.diffusion is not None:
        whole |= more_shapes(model).keys()
    whole |= {f"decoder.layers.{layer}.mlp.linear_fc2.bias" for layer in range(model.num_layers)}
    for layer, mixer in enumerate(model.layers):
        names = mixer_spec(mixer).whole_parameters(model, layer)
        whole |= {f"decoder.layers.{layer}.self_attention.{name}" for name in names}
    return whole


def _stages(name: str, stage_of: dict[int, int], *, last: int, tied: bool) -> Collection[int]:
    """Those that hold the parameter."""
    if match := _LAYER.match(name):
        return {stage_of[int(match[1])]}
    if name.startswith("output_layer."):
        return {last}
    if name == _EMBEDDING_WEIGHT and tied:
        # Once where one stage is both the first and the last.
        return {0, last}
    if name.startswith("embedding."):
        return {0}
    if name.startswith("decoder."):
        return {last}
    # What is neither in the embedding nor in a layer is a part that every stage reads.
    return range(last + 1)
