"""What ``lightscale.load`` gives of each task: what all have in common, and those that predict no next token.

model = lightscale.load("runs/masked")
model.fill("The [MASK] sat on the mat."); model.logits("The [MASK] sat."); model.embed("some text")
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.inference.written_text import encode_prompt
from lightscale.evaluation.prediction.documents import MASK_TEXT, MaskWriting, with_masks
from lightscale.evaluation.prediction.token_texts import token_texts
from lightscale.exchange.plain.model import Classifier, MaskedModel, PlainModel, pooled

Module = TypeVar("Module", bound=PlainModel)


@dataclass(frozen=True, kw_only=True)
class Filling:
    """What may stand in the place of a mask."""

    token: str
    """Its text, with the space that it begins with."""
    id: int
    probability: float


@dataclass(frozen=True, kw_only=True)
class LibraryModel(Generic[Module]):
    """A model with its tokenizer.

    Texts are documents: where one is given, the end-of-text token is put before it, as in training. Where ids are
    given, they are taken as they are.
    """

    module: Module
    """An ``nn.Module`` of plain PyTorch, in evaluation mode."""
    tokenizer: Tokenizer
    origin: str
    """The checkpoint or directory that the weights are from."""
    refused: tuple[str, ...] = ()
    """Why newer checkpoints were skipped, one line each."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.module.model.embed_tokens.weight.device

    def ids(self, text: str | Sequence[int] | Tensor) -> Tensor:
        """(n,) of a text, its end-of-text token first, or of ids; or (b, n) of a tensor of them."""
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
        """UserError for a document of more tokens than the model has learned positions."""
        known = self.module.shape.learned_positions
        if known and tokens > known:
            raise UserError(f"{tokens} tokens, but {self.origin} has {known} learned positions; use fewer tokens")

    @torch.inference_mode()
    def embed(self, text: str | Sequence[int] | Tensor, pooling: Literal["mean", "last"] = "mean") -> Tensor:
        """(d,) of a text, or (b, d) for rows of ids: the mean of its tokens' last states, or that of the last one."""
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
        """UserError: such a model does not continue a text."""
        raise UserError(
            f'{self.origin}: its task is "{self.module.shape.task}": only models that predict the next token '
            f'(task.name = "causal") generate text; this model has {self._has}, logits and embed'
        )

    def stream(self, *args: object, **kwargs: object) -> NoReturn:
        """UserError: as ``generate``."""
        self.generate()

    def loss(self, *args: object, **kwargs: object) -> NoReturn:
        """UserError: it is the next token's."""
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
        """Of what stands at each token: (n, V), or (b, n, V) for rows of ids; the mask is no answer. Gradients flow."""
        ids = self.ids(text)
        logits: Tensor = self.module(ids.view(-1, ids.size(-1)))
        return logits if ids.dim() == 2 else logits[0]

    @torch.inference_mode()
    def fill(self, text: str | Sequence[int], *, top: int = 5) -> list[list[Filling]]:
        """For each mask of a text, or of its ids, the ``top`` tokens that are most probable there."""
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
    """A model that names the class of a text, and its tokenizer."""

    classes: tuple[str, ...] = ()
    """The names of the classes, by number, as far as they are known."""

    def logits(self, text: str | Sequence[int] | Tensor) -> Tensor:
        """Of the classes: (labels,), or (b, labels) for rows of ids. Gradients flow."""
        ids = self.ids(text)
        logits: Tensor = self.module(ids.view(-1, ids.size(-1)))
        return logits if ids.dim() == 2 else logits[0]

    @torch.inference_mode()
    def classify(self, text: str | Sequence[int]) -> dict[str, float]:
        """The probability of each class by its name, or its number where it has none, the most probable first."""
        ids = self.ids(text)
        if ids.dim() != 1:
            raise UserError(f"classify takes one text; got ids of the shape {tuple(ids.shape)}")
        shares = self.logits(ids).softmax(-1)
        order = shares.argsort(descending=True, stable=True).tolist()
        return {self.classes[n] if n < len(self.classes) else str(n): float(shares[n]) for n in order}

    @property
    def _has(self) -> str:
        return "classify"
