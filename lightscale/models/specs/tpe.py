"""The Toeplitz positional encoding, a part behind the embedding; see ``layers/tpe.py``."""

from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.kernels.operators import get_operator
from lightscale.models.specs.interface import EmbeddingPartSpec, PartExchange, PartParameter

DECAYS_TERM = "TPE decays"
"""Term of the decays in counts of parameters."""


class TPESpec(EmbeddingPartSpec):
    """Modes for each channel: ``model.tpe.modes``, by default head_dim."""

    name = "tpe"
    implementation = "lightscale.models.layers.tpe:TPE"
    operator: ClassVar[str | None] = "tpe"

    @staticmethod
    def parameters_of(model: ModelConfig) -> dict[str, PartParameter]:
        """``decay_logit`` (e,) and, unless as printed, ``gamma`` (d, e), with e modes."""
        modes = tpe_modes(model)
        # A decay near 1 is applied thousands of times.
        decays = {"decay_logit": PartParameter(shape=(modes,), term=DECAYS_TERM, keep_wide=True)}
        if is_printed(model):
            return decays
        return decays | {"gamma": PartParameter(shape=(model.hidden_size, modes), term="TPE", split_dim=0)}

    @staticmethod
    def forward_flops_per_token(model: ModelConfig) -> float:
        """A short Toeplitz product, and the state read and written, per channel."""
        return model.hidden_size * (2 * get_operator("tpe").chunk_size + 4 * tpe_modes(model))

    @staticmethod
    def exchange_values(model: ModelConfig) -> PartExchange:
        """States, and λ^n, which is the same for all channels."""
        modes = tpe_modes(model)
        return PartExchange(channels=model.hidden_size, state=model.hidden_size * modes, whole=modes)


def tpe_modes(model: ModelConfig) -> int:
    """Decays of the encoding."""
    return (model.tpe and model.tpe.modes) or model.head_dim


def is_printed(model: ModelConfig) -> bool:
    """Whether it is LightNet's equation 11 as it stands there."""
    return model.tpe is not None and model.tpe.form == "printed"
