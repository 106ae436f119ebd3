"""The Toeplitz positional encoding, a part behind the embedding; see ``layers/tpe.py``."""

from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.kernels.operators import get_operator
from lightscale.models.specs.interface import EmbeddingPartSpec, PartExchange, PartParameter

DECAYS_TERM = "TPE decays"
"""What the decays count as."""


class TPESpec(EmbeddingPartSpec):
    """head_dim modes for each channel."""

    name = "tpe"
    implementation = "lightscale.models.layers.tpe:TPE"
    operator: ClassVar[str | None] = "tpe"

    @staticmethod
    def parameters_of(model: ModelConfig) -> dict[str, PartParameter]:
        """``decay_logit`` (e,) and ``gamma`` (d, e), with e = head_dim modes."""
        modes = model.head_dim
        return {
            # A decay near 1 is applied thousands of times.
            "decay_logit": PartParameter(shape=(modes,), term=DECAYS_TERM, keep_wide=True),
            "gamma": PartParameter(shape=(model.hidden_size, modes), term="TPE", split_dim=0),
        }

    @staticmethod
    def forward_flops_per_token(model: ModelConfig) -> float:
        """A short Toeplitz product, and the state read and written, per channel."""
        return model.hidden_size * (2 * get_operator("tpe").chunk_size + 4 * model.head_dim)

    @staticmethod
    def exchange_values(model: ModelConfig) -> PartExchange:
        """States, and λ^n, which is the same for all channels."""
        return PartExchange(channels=model.hidden_size, state=model.hidden_size * model.head_dim, whole=model.head_dim)
