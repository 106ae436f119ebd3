"""Models that ``lightscale.load`` returns: the common base class, and the models of masks and labels.

model = lightscale.load("runs/masked")
model.fill("The [MASK] sat on the mat."); model.logits("The [MASK] sat."); model.embed("some text")
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.inference.written_text import encode_prompt
from lightscale.evaluation.prediction.documents import MASK_TEXT, MaskWriting, with_masks
from lightscale.evaluation.prediction.token_texts import token_texts
from lightscale.exchange.plain.model import Classifier, MaskedModel, PlainModel
from lightscale.exchange.plain.units import pooled

Module = TypeVar("Module", bound=PlainModel)


@dataclass(frozen=True, kw_only=True)
class Filling:
    """One candidate token for a mask."""

    token: str
    """Its text, with the space that it begins with."""
    id: int
    probability: float


@dataclass(frozen=True, kw_only=True)
class LibraryModel(Generic[Module]):
    """A model with its tokenizer. Texts are documents: the end-of-text token is added before a text, as in training.
    Ids are used unchanged.
    """

    module: Module
    """An ``nn.Module`` of plain PyTorch, in evaluation mode."""
    tokenizer: Tokenizer
    origin: str
    """The checkpoint or directory that the weights are from."""
    refused: tuple[str, ...] = ()
    """Why newer checkpoints were skipped, one line each."""
    chat_template: Chat | None = None
    """That of the conversations that it was trained on; None: it was trained on texts."""
    context: int | None = None
    """Tokens of a text that it can be asked about; None: any number."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.module.model.embed_tokens.weight.device

    def ids(self, text: str | Sequence[int] | Tensor) -> Tensor:
        """Token ids: (n,) of a text, after the end-of-text token, or of ids; (b, n) of a tensor of rows."""
        if isinstance(text, str):
            text = self._encoded(text)
        found = torch.as_tensor(text, dtype=torch.int64, device=self.device)
        if found.dim() not in (1, 2) or not found.numel():
            raise UserError(f"ids must be (n,) or (b, n) with at least one id; got the shape {tuple(found.shape)}")
        rows = self.module.shape.vocab_size
        if int(found.min()) < 0 or int(found.max()) >= rows:
            raise UserError(f"ids must be from 0 to {rows - 1}; got {int(found.min())} to {int(found.max())}")
        self.check_length(found.size(-1))
        return found

    def check_length(self, tokens: int) -> None:
        """Raise ``UserError`` for a document with more tokens than learned positions."""
        known = self.module.shape.learned_positions
        if known and tokens > known:
            raise UserError(f"{tokens} tokens, but {self.origin} has {known} learned positions; use fewer tokens")

    @torch.inference_mode()
    def embed(self, text: str | Sequence[int] | Tensor, pooling: Literal["mean", "last"] = "mean") -> Tensor:
        """Embedding (d,) of a text, or (b, d) for rows of ids: the mean of the last states, or the last token's."""
        if pooling not in ("mean", "last"):
            raise UserError(f"pooling = {pooling!r}: use mean or last")
        ids = self.ids(text)
        found = pooled(self.module.model(ids.view(-1, ids.size(-1)))[0], None, pooling)
        return found if ids.dim() == 2 else found[0]

    def _encoded(self, text: str) -> Sequence[int]:
        return encode_prompt(self.tokenizer, text)


class _PredictsNoText(LibraryModel[Module]):
    """What a model that reads whole texts cannot do is refused with the reason, by the names that others have."""

    def generate(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise ``UserError``: this model does not continue a text."""
        raise UserError(
            f'{self.origin}: its task is "{self.module.shape.task}": only models that predict the next token '
            f'(task.name = "causal") generate text; this model has {self._has}, logits and embed'
        )

    def stream(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise ``UserError``, as ``generate`` does."""
        self.generate()

    def loss(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise ``UserError``: the loss is that of the next token."""
        self.generate()

    @property
    def _has(self) -> str:
        return "fill"


class FillMaskModel(_PredictsNoText[MaskedModel]):
    """A model that fills masks, and its tokenizer; ``[MASK]`` in a text is a mask: the id behind the last token's."""

    @property
    def mask_id(self) -> int:
        """The id of the mask."""
        return self.tokenizer.vocab_size

    def logits(self, text: str | Sequence[int] | Tensor) -> Tensor:
        """Logits of the token at each position: (n, V), or (b, n, V) for rows, without the mask. Differentiable."""
        ids = self.ids(text)
        logits: Tensor = self.module(ids.view(-1, ids.size(-1)))
        return logits if ids.dim() == 2 else logits[0]

    @torch.inference_mode()
    def fill(self, text: str | Sequence[int], *, top: int = 5) -> list[list[Filling]]:
        """The ``top`` most probable tokens for each mask of a text or of ids."""
        ids = self.ids(text)
        if ids.dim() != 1 or not (ids == self.mask_id).any():
            raise UserError(f"no mask in the text; write {MASK_TEXT} for each token to predict")
        if top < 1:
            raise UserError(f"top = {top}: must be at least 1")
        shares = self.logits(ids)[ids == self.mask_id].float().softmax(-1).topk(min(top, self.tokenizer.vocab_size))
        of_token = token_texts(self.tokenizer)
        return [
            [
                Filling(token=of_token(number), id=number, probability=share)
                for share, number in zip(values, numbers, strict=True)
            ]
            for values, numbers in zip(shares.values.tolist(), shares.indices.tolist(), strict=True)
        ]

    def _encoded(self, text: str) -> Sequence[int]:
        found: list[int] = with_masks(self.tokenizer, text, MaskWriting(text=MASK_TEXT, id=self.mask_id)).tolist()
        return found


@dataclass(frozen=True, kw_only=True)
class TextClassifier(_PredictsNoText[Classifier]):
    """A model that classifies texts, and its tokenizer."""

    classes: tuple[str, ...] = ()
    """Names of the classes, by number, where the run has them."""

    def logits(self, text: str | Sequence[int] | Tensor) -> Tensor:
        """Logits of the classes: (labels,), or (b, labels) for rows of ids. Differentiable."""
        ids = self.ids(text)
        logits: Tensor = self.module(ids.view(-1, ids.size(-1)))
        return logits if ids.dim() == 2 else logits[0]

    @torch.inference_mode()
    def classify(self, text: str | Sequence[int]) -> dict[str, float]:
        """Probability of each class by name (by number if it has no name), most probable first."""
        ids = self.ids(text)
        if ids.dim() != 1:
            raise UserError(f"classify takes one text; got ids of the shape {tuple(ids.shape)}")
        shares = self.logits(ids).softmax(-1)
        order = shares.argsort(descending=True, stable=True).tolist()
        return {self.classes[n] if n < len(self.classes) else str(n): float(shares[n]) for n in order}

    @property
    def _has(self) -> str:
        return "classify"
