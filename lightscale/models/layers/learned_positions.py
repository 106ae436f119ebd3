"""Learned positions, as in GPT-2 and BERT: the stream becomes x_t + p_i, i the tokens since the document's start."""

import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.shared_parts import EmbeddingPart
from lightscale.models.specs.positions import LearnedPositionsSpec
from lightscale.parallel.initialization import DrawWeights, normal


class LearnedPositions(EmbeddingPart):
    """x (n, b, d / tensor) -> x + p, once per model, after the embedding. No state: positions come with the tokens."""

    spec = LearnedPositionsSpec

    table: nn.Parameter

    @staticmethod
    def initial_values(model: ModelConfig) -> dict[str, DrawWeights]:
        """As large as the embedding's."""
        return {"table": normal(model.embedding_std or model.init_std)}

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n, b, d / tensor), this tensor rank's channels of all tokens -> the same.

        Raises:
            UserError: rows that may have more positions than the table.
        """
        known, n = self.table.size(0), x.size(0)
        if context.states is not None:
            # Of text that is generated only the positions themselves say how long it is.
            longest = int(context.positions_on_host.max()) + 1 if n else 0
        elif context.exchange is not None:
            longest = n * context.exchange.size if context.lengths is None else sum(context.lengths)
        else:
            longest = n
        if longest > known:
            raise UserError(
                f"{longest} tokens, but the model has {known} learned positions (model.mixer_options, positions); use "
                "shorter sequences, or train with more positions"
            )
        return x + F.embedding(context.positions, self.table).transpose(0, 1)
