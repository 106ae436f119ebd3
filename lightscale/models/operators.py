"""Which back-end of each operator a model uses, for the log of a run."""

import torch

from lightscale.config.model import ModelConfig
from lightscale.kernels.common.backends import choose_backend
from lightscale.models.registry import layer_operators, mixer_spec, shared_specs

# But for the last one, which models of images have no vocabulary for.
_IN_EVERY_MODEL = ("norm", "glu", "cross_entropy")


def operators_of(model: ModelConfig) -> tuple[str, ...]:
    """The names of the operators that ``model`` is made of, each once."""
    names = list(layer_operators(model))
    names += [name for mixer in model.layers for name in mixer_spec(mixer).other_operators]
    names += [part.operator for part in shared_specs(model) if part.operator is not None]
    of_all = [name for name in _IN_EVERY_MODEL if name != "cross_entropy" or model.vocab_size]
    return tuple(dict.fromkeys((*names, *of_all)))


def describe_operators(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """One line: each operator of ``model`` and its back-end for inputs of ``dtype`` on ``device``.

    Raises:
        UserError: an operator that is not described (``kernels.operators``), or what was asked for
            (``train.kernels``) is not there or cannot compute such inputs.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    chosen = {name: choose_backend(name, like) for name in operators_of(model)}
    return "kernels: " + ", ".join(f"{name} {backend}" for name, backend in chosen.items())
