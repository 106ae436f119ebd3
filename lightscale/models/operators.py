"""Which form of each operator a model uses, for the log of a run."""

import torch

from lightscale.config.schema import ModelConfig
from lightscale.kernels import cross_entropy, gla, glu, lightnet, lightning, norm, tpe
from lightscale.models.registry import mixer_class, shared_parts

_BACKENDS = {
    "lightning": lightning.backend_of,
    "gla": gla.backend_of,
    "lightnet": lightnet.backend_of,
    "tpe": tpe.backend_of,
    "norm": norm.backend_of,
    "glu": glu.backend_of,
    "cross_entropy": cross_entropy.backend_of,
}


def describe_operators(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """One line: each operator of ``model`` and what computes it for inputs of ``dtype`` on ``device``.

    Raises:
        UserError: what was asked for (``train.kernels``) is not there or cannot compute such inputs.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    names = [mixer_class(name).operator for name in model.layers]
    names += [part.operator for part in shared_parts(model) if part.operator is not None]
    names += ["norm", "glu", "cross_entropy"]
    chosen = {name: _BACKENDS[name](like) if name in _BACKENDS else "PyTorch" for name in names}
    return "kernels: " + ", ".join(f"{name} {backend}" for name, backend in chosen.items())
