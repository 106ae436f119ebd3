"""The rows of queries and keys of each head whose scores go through a softmax; without torch."""

from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.models.registry import mixer_spec
from lightscale.models.specs.interface import MixerSpec, ParameterRows
from lightscale.parallel.optimizer_spec import HeadRows


def softmax_layers(model: ModelConfig) -> dict[int, type[MixerSpec]]:
    """The specs of the layers (from 0) that have attention logits."""
    specs = ((layer, mixer_spec(name)) for layer, name in enumerate(model.layers))
    return {layer: spec for layer, spec in specs if spec.has_logits}


def check_measured_logits(config: RunConfig) -> None:
    """Raise UserError where logits are to be measured of a model that has none."""
    every = config.metrics.attention_logits_every
    if every and not softmax_layers(config.model):
        raise UserError(f"metrics.attention_logits_every = {every}: {_no_logits(config.model)}; set it to 0")


def _no_logits(model: ModelConfig) -> str:
    return f"no layer of the model ({', '.join(dict.fromkeys(model.layers))}) has softmax attention"


def clipped_rows(model: ModelConfig) -> dict[str, tuple[HeadRows, ...]]:
    """By global name of a parameter, what QK-clip scales of each head.

    Queries and keys of a head share a factor. Keys that several heads of queries read are left alone, as the paper
    leaves MLA's shared rotary keys: each head's factor goes to its queries whole. Biases are scaled with the weights.

    Raises UserError for a model without logits, and for norms of queries and keys, which would undo the scaling.
    """
    layers = softmax_layers(model)
    if not layers:
        raise UserError(f"{_no_logits(model)}, whose logits it bounds; set it to none")
    found: dict[str, list[HeadRows]] = {}
    for layer, spec in layers.items():
        shapes, roles = spec.parameter_shapes(model, layer), spec.roles(model, layer)
        if "q_norm" in roles:
            option = f"model.mixer_options.{model.layers[layer]}.qk_norm"
            kind = model.layer_options(layer).model_dump()["qk_norm"]
            raise UserError(
                f'{option} = "{kind}" normalises queries and keys, and undoes what it scales; set it to none, or '
                f'{option} to "none"'
            )
        groups = spec.key_heads(model, layer)
        powers = {"q": 0.5, "k": 0.5} if groups == model.num_heads else {"q": 1.0}
        for role, power in powers.items():
            for rows in (roles[one] for one in (role, f"{role}_bias") if one in roles):
                name = f"decoder.layers.{layer}.self_attention.{rows.parameter}"
                found.setdefault(name, []).extend(
                    HeadRows(layer=layer, head=head, first=first, last=last, power=power)
                    for head, first, last in _by_head(rows, shapes[rows.parameter][0], model.num_heads)
                )
    return {name: tuple(rows) for name, rows in found.items()}


def _by_head(rows: ParameterRows, num_rows: int, num_heads: int) -> list[tuple[int, int, int]]:
    """(head, first row, last + 1) of every range, cut where heads end."""
    ranges = rows.ranges or ((0, num_rows),)
    size = sum(last - first for first, last in ranges) // num_heads
    found, head, left = [], 0, size
    for first, last in ranges:
        while first < last:
            taken = min(left, last - first)
            found.append((head, first, first + taken))
            first, left = first + taken, left - taken
            if not left:
                head, left = head + 1, size
    return found
