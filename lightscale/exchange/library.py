"""lightscale as a library: the model of a run or of an export as an object, without process groups.

    model = lightscale.load("runs/quickstart")
    model.generate("def ", tokens=50); model.logits("some text"); model.loss("some text")
    lightscale.load("runs/talk").chat().ask("How many?")

    lightscale.load("runs/masked").fill("The [MASK] sat.");  lightscale.load("runs/classes").classify("some text")
    lightscale.load("runs/digits").classify("some.png")

Several models can be loaded at once. The module is plain PyTorch (``plain/``), in evaluation mode and trainable.
"""

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.arguments import run_path
from lightscale.data_pipeline.chat.files import find_template
from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import choose_run
from lightscale.evaluation.inference.prompts import Sampling
from lightscale.evaluation.inference.sampling import Chooser, choose
from lightscale.evaluation.inference.written_text import decode_stream, encode_prompt
from lightscale.exchange.chat.markup import Markup
from lightscale.exchange.chat.session import ChatSession
from lightscale.exchange.export_reader import is_export, open_export
from lightscale.exchange.files.pipeline_folder import refuse_pipeline
from lightscale.exchange.files.weights import empty_model, kept_dtype
from lightscale.exchange.loaded import FillMaskModel, LibraryModel, TextClassifier
from lightscale.exchange.loaded_images import ImageModel
from lightscale.exchange.plain.mixers import State
from lightscale.exchange.plain.model import CausalModel, Classifier, ImageClassifier, MaskedModel
from lightscale.exchange.trained import OpenedModel, open_run
from lightscale.runs.run_directory import split_step

PREFILL_TOKENS = 1024
"""Tokens of a text that pass through the model at once; bounds the memory of activations."""


class TextModel(LibraryModel[CausalModel]):
    """A language model with its tokenizer; ``module`` maps ids (b, n) and states to logits (b, n, V) and states."""

    def logits(self, text: str | Sequence[int] | Tensor) -> Tensor:
        """Logits of the next token at each position: (n, V), or (b, n, V) for rows of ids. Differentiable."""
        ids = self.ids(text)
        logits: Tensor = self.module(ids.view(-1, ids.size(-1)))[0]
        return logits if ids.dim() == 2 else logits[0]

    @torch.inference_mode()
    def loss(self, text: str | Sequence[int] | Tensor) -> float:
        """Mean negative log-likelihood in nats, of the tokens of a text, or of all ids except the first of each row."""
        ids = self.ids(text)
        ids = ids.view(-1, ids.size(-1))
        if ids.size(1) < 2:
            raise UserError("the text has no token to score: it is empty or has one id")
        total, states = 0.0, None
        # The logits of a long text would be by far the largest tensor.
        for start in range(0, ids.size(1) - 1, PREFILL_TOKENS):
            inputs = ids[:, start : min(start + PREFILL_TOKENS, ids.size(1) - 1)]
            logits, states = self.module(inputs, states)
            labels = ids[:, start + 1 : start + 1 + inputs.size(1)]
            total += F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum").item()
        return total / ids[:, 1:].numel()

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> str:
        """Continue ``prompt`` and return the new text; arguments as for ``stream``."""
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed
        )
        return "".join(self._written(prompt, tokens, stop, sampling))

    def stream(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> Iterator[str]:
        """Continue ``prompt`` and yield the new text in parts, each as soon as it is final.

        Args:
            prompt: the document so far; empty: the model starts a document.
            tokens: maximum number of new tokens; fewer if the model ends the text.
            temperature: divisor of the logits; 0: always the most probable token.
            top_k: sample only from the k most probable tokens.
            top_p: sample only from the smallest set of tokens with this total probability.
            repetition_penalty: lowers the probability of tokens already in the document (``Sampling``); 1: no penalty.
            stop: strings; the text ends before the first one.
            seed: random seed.
        """
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed
        )
        return self._written(prompt, tokens, stop, sampling)

    def _written(self, prompt: str, tokens: int, stop: Sequence[str], sampling: Sampling) -> Iterator[str]:
        if tokens < 1:
            raise UserError(f"tokens = {tokens}: must be at least 1")
        # A string is a sequence of strings too, and would stop at each of its characters.
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(stops):
            raise UserError("stop = '': a stop string must have at least one character")
        prompt_ids = encode_prompt(self.tokenizer, prompt)
        # The last token is not read.
        self.check_length(len(prompt_ids) + tokens - 1)
        return decode_stream(self.tokenizer, self._continued(prompt_ids, tokens, sampling), stops)

    def _continued(self, prompt_ids: Sequence[int], tokens: int, sampling: Sampling) -> Iterator[int]:
        logits, states = self.feed(prompt_ids, None)
        chooser = Chooser(sampling, prompt_ids)
        for remaining in reversed(range(tokens)):
            (token,) = choose(logits[None], [chooser])
            if token == self.tokenizer.eot_id:
                return
            yield token
            if remaining:
                logits, states = self.feed([token], states)

    def chat(
        self, system: str | None = None, *, template: Chat | str | None = None, context: int | None = None
    ) -> ChatSession:
        """Begin a conversation.

        Args:
            system: message of the system; None: no such message.
            template: chat template, also by its name or file ("chatml"); None: that of the model's conversations.
            context: most tokens of the conversation, at most the learned positions; None: any number for linear mixers,
                the longest training sequence with softmax attention.

        Raises:
            UserError: the model has no chat template, or one that does not write questions and answers.
        """
        if isinstance(template, str):
            template = Chat(files=find_template(template, None, key="template"))
        template = template or self.chat_template
        if template is None:
            raise UserError(
                f"{self.origin}: no chat template: it was trained on texts, not on conversations; give one (template)"
            )
        limits = [limit for limit in (context or self.context, self.module.shape.learned_positions) if limit]
        markup = Markup(template, self.tokenizer)
        return ChatSession(self, markup, system=system, context=min(limits, default=None))

    @torch.inference_mode()
    def feed(self, ids: Sequence[int], states: list[State] | None) -> tuple[Tensor, list[State]]:
        """Read ``ids`` behind ``states`` (None: a document begins); logits (V,) of the next token, and the states."""
        rows = torch.tensor([ids], device=self.device)
        for part in rows.split(PREFILL_TOKENS, dim=1):
            logits, states = self.module(part, states, last_only=True)
        assert states is not None, "no token to read"
        return logits[0, -1], states


def load(
    source: str | PathLike[str], *, device: str = "auto", dtype: torch.dtype | None = None
) -> TextModel | FillMaskModel | TextClassifier | ImageModel:
    """Load the model of a run (``"runs/x"`` or ``"runs/x@step"``) or of an exported directory.

    Args:
        source: a run's directory, or NAME for runs/NAME, with @STEP for a checkpoint other than the newest intact one;
            or a directory of ``lightscale export``.
        device: "auto", "cpu" or "cuda"; auto: a GPU if available.
        dtype: dtype of the weights; None: as stored. Angles, decays and bounds stay fp32 in half precision.

    Raises:
        UserError: the run, checkpoint or export is missing or damaged.
    """
    where, opened = _device(device), _opened(source)
    if opened.shape.task == "diffusion":
        raise UserError(f"{opened.origin}: it predicts noise; use `lightscale draw`, or pipeline.py of its export")
    # Every weight is put in its place as it is read.
    module = empty_model(opened.shape)
    for name, _ in list(module.named_parameters()):
        weight = opened.read(name)
        if dtype is not None:
            weight = weight.to(kept_dtype(name, dtype))
        module.load_state_dict({name: weight.to(where)}, strict=False, assign=True)
    module.eval()
    of_run: dict[str, Any] = {
        "tokenizer": opened.tokenizer,
        "origin": str(opened.origin),
        "refused": opened.refused,
        "chat_template": opened.chat,
        "context": opened.context,
    }
    if isinstance(module, CausalModel):
        return TextModel(module=module, **of_run)
    if isinstance(module, ImageClassifier):
        names = tuple(opened.classes)
        return ImageModel(module=module, origin=str(opened.origin), refused=opened.refused, classes=names)
    if isinstance(module, MaskedModel):
        return FillMaskModel(module=module, **of_run)
    assert isinstance(module, Classifier), "refused before"
    return TextClassifier(module=module, classes=tuple(opened.classes), **of_run)


def _opened(source: str | PathLike[str]) -> OpenedModel:
    path = Path(source)
    refuse_pipeline(path)
    if is_export(path):
        return open_export(path)
    if path.is_dir() and not (path / "config.toml").exists():
        raise UserError(f"{path}: not a run (config.toml) or an export (config.json)")
    run, step = split_step(str(source))
    return open_run(choose_run(run_path(run), step=step, any_task=True))


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"device = {name!r}: use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda', but PyTorch finds no GPU; use 'auto' or 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
