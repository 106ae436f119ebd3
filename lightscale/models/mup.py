"""µP: initial weights and learning rates of each parameter by the model's width and depth; without torch.

arXiv 2203.03466 (table 8) for the width, 2505.01618 (table 1) for the depth, and the spectral condition of 2310.17813,
from which both follow for other optimizers. The roles of all parameters are read from their shapes: a dim that grows
with the model's width is "infinite". So mixers have no part in it, and a new one has µP without a line of its own.

No factor stands in the forward pass but that of embedded tokens. A factor c of a weight's product equals c times its
initial standard deviation and c times its learning rate, for optimizers whose steps do not depend on the gradients'
size; so weights alone carry µP, and an export is that of any model.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes
from lightscale.models.matrices import matrices
from lightscale.models.registry import mixer_spec
from lightscale.models.specs.label_head import HIDDEN_WEIGHT
from lightscale.models.specs.label_head import PREFIX as OF_HEAD

_BLOCK = re.compile(r"decoder\.layers\.(\d+)\.(self_attention|mlp)?\.?(.+)")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_HEAD_HIDDEN = f"{OF_HEAD}{HIDDEN_WEIGHT}"
# Options that count heads; with these, all heads stay as wide in models of other widths.
_NUMBERS_OF_HEADS = re.compile(r"num_\w*heads")


@dataclass(frozen=True, kw_only=True)
class MuPScale:
    """Factors of a parameter beside those of the base model; 1: as there."""

    std: float = 1.0
    """Of the initial standard deviation."""
    lr: float = 1.0
    """Of the learning rate of optimizers that step each element by about the same (Adam, Lion)."""
    eps: float = 1.0
    """Of the constant beside the root of a second moment, which is of the size of gradients."""
    depth: float = 1.0
    """The part of ``lr`` that is the depth's."""
    growth: tuple[float, float] = (1.0, 1.0)
    """Rows and columns of a matrix over those in the base model."""

    def matrix_lr(self, rows: int, columns: int, singular: Callable[[float, float], float]) -> float:
        """Of the learning rate of an optimizer whose steps have singular values of ``singular(rows, columns)``.

        They are to be as sqrt(rows / columns).
        """
        of_rows, of_columns = self.growth
        own = singular(rows, columns) / singular(rows / of_rows, columns / of_columns)
        return self.depth * math.sqrt(of_rows / of_columns) / own


def mup_scales(model: ModelConfig) -> dict[str, MuPScale]:
    """Factors of each parameter by its global name; empty without ``model.mup``.

    Raises UserError for a depth other than that of the table in models whose mixers have no output projection.
    """
    if model.mup is None:
        return {}
    linear, shapes, wider = (
        matrices(model),
        parameter_shapes(model),
        parameter_shapes(at_width(model, 2 * model.hidden_size)),
    )
    outputs = _outputs(model)
    found = {}
    for name, shape in shapes.items():
        if name in linear or name == _HEAD_HIDDEN:
            of_shape = _matrix(model.width_ratio, shape, wider[name])
        elif name == _OUTPUT or (name == _EMBEDDING and model.ties_weights):
            # What maps to logits starts small and moves by as much; its gradients are of one size at all widths.
            of_shape = MuPScale(std=1 / model.width_ratio, lr=1 / model.width_ratio)
        else:
            of_shape = MuPScale(eps=1 / model.width_ratio)
        found[name] = _at_depth(model, name, of_shape, is_output=name in outputs)
    return found


def _matrix(ratio: float, shape: tuple[int, ...], wider: tuple[int, ...]) -> MuPScale:
    """Of a linear layer, (out, in), whose shape in a wider model says which dims grow."""
    grows_out, grows_in = (after > before for before, after in zip(shape, wider, strict=True))
    fan_out, fan_in = ratio if grows_out else 1.0, ratio if grows_in else 1.0
    # A sum over n inputs is as large as one of them by 1 / sqrt(n) at first. To outputs whose number stays, such as
    # the inner channels of a low-rank gate, 1 / n: their gradients are sums over all that they lead to.
    std = 1 / math.sqrt(fan_in) if grows_out else 1 / fan_in
    return MuPScale(std=std, lr=1 / fan_in, eps=1 / ratio, growth=(fan_out, fan_in))


def _at_depth(model: ModelConfig, name: str, scale: MuPScale, *, is_output: bool) -> MuPScale:
    """With the factors of a block's parameters.

    What a block adds is divided by (layers / base)^α, here in the weights of the output projections. Steps add up over
    the blocks: each is to change its sum by 1 / layers.
    """
    ratio, alpha = model.depth_ratio, model.mup.depth_exponent if model.mup else 1.0
    if ratio == 1 or not name.startswith("decoder.layers."):
        return scale
    added, steps = ratio**-alpha, ratio ** (alpha - 1)
    std, lr, eps = (added, added * steps, 1.0) if is_output else (1.0, steps, added)
    return replace(scale, std=scale.std * std, lr=scale.lr * lr, eps=scale.eps * eps, depth=lr)


def at_width(model: ModelConfig, width: int) -> ModelConfig:
    """``model`` of another width, a multiple of a head's, by other numbers of heads as wide as its own."""
    table, share = model.model_dump(), width / model.hidden_size
    table |= {"hidden_size": width, "num_heads": round(model.num_heads * share)}
    table["intermediate_size"] = round(model.intermediate_size * share)
    for options in table["mixer_options"].values():
        for key, value in options.items():
            if _NUMBERS_OF_HEADS.fullmatch(key) and value is not None:
                options[key] = max(1, round(value * share))
    return type(model).model_validate(table)


def _outputs(model: ModelConfig) -> set[str]:
    """Names of weights and biases whose products are what blocks add to the residual stream."""
    found = set()
    for layer, mixer in enumerate(model.layers):
        roles = mixer_spec(mixer).roles(model, layer)
        own = {roles[role].parameter for role in ("o", "o_bias") if role in roles}
        if not own and model.depth_ratio != 1:
            raise UserError(
                f"model.mup.base_num_layers with model.mixer = {mixer}, here without an output projection, whose "
                'weights carry the factor of depth; use base_num_layers = "none"'
            )
        found |= {f"decoder.layers.{layer}.self_attention.{name}" for name in own}
        found |= {f"decoder.layers.{layer}.mlp.linear_fc2.{kind}" for kind in ("weight", "bias")}
    return found
