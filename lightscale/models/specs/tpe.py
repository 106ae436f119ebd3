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
        """``decay_logit`` (e,) and, unless as printed, ``gamma`` (d, e), with e modes; of axes (a, e), (d, a, e).

        The counts of table 1, 0.10M for d = 384 and 0.20M for 768, fit weights of each axis. Equation 11, the printed
        form, has one set of decays.
        """
        modes, axes = tpe_modes(model), () if model.axes == 1 else (model.axes,)
        of_decays = (modes,) if is_printed(model) else (*axes, modes)
        # A decay near 1 is applied thousands of times.
        decays = {"decay_logit": PartParameter(shape=of_decays, term=DECAYS_TERM, keep_wide=True)}
        if is_printed(model):
            return decays
        shape = (model.hidden_size, *axes, modes)
        return decays | {"gamma": PartParameter(shape=shape, term="TPE", split_dim=0)}

    @staticmethod
    def forward_flops_per_token(model: ModelConfig) -> float:
        """A short Toeplitz product, and the state read and written, per channel and axis."""
        return model.axes * model.hidden_size * (2 * get_operator("tpe").chunk_size + 4 * tpe_modes(model))

    @staticmethod
    def exchange_values(model: ModelConfig) -> PartExchange:
        """States, and λ^n, which is the same for all channels; of each line that the next tokens go on."""
        modes = tpe_modes(model)
        lines = 1 if model.grid is None else sum(model.grid.strides)
        return PartExchange(channels=model.hidden_size, state=lines * model.hidden_size * modes, whole=lines * modes)


def tpe_modes(model: ModelConfig) -> int:
    """Decays of the encoding."""
    return (model.tpe and model.tpe.modes) or model.head_dim


def is_printed(model: ModelConfig) -> bool:
    """Whether it is LightNet's equation 11 as it stands there."""
    return model.tpe is not None and model.tpe.form == "printed"
