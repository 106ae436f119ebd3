"""A model of random weights for conversations, made without the training engine."""

from functools import cached_property
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lightscale.data_pipeline.chat.files import DEFAULT, TemplateFiles
from lightscale.data_pipeline.chat.named import NAMED
from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.tokenizers import HuggingFaceTokenizer
from lightscale.exchange.library import TextModel
from lightscale.exchange.plain.model import CausalModel, Shape

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>"),
)


def byte_level_file() -> bytes:
    """tokenizer.json: a token for each byte, and ``SPECIAL``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in SPECIAL])
    return str(tokenizer.to_str()).encode()


@pytest.fixture(scope="session")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(byte_level_file(), origin="test")


def chat_of(template: str, **more: Any) -> Chat:
    text = NAMED.get(template, template)
    return Chat(files=TemplateFiles(origin="the template", templates={DEFAULT: text}), **more)


@pytest.fixture(scope="session")
def shape() -> Shape:
    return Shape(
        vocab_size=263,
        hidden_size=32,
        mixers=("tnl", "hgrn2"),
        num_attention_heads=4,
        intermediate_size=48,
    )


@pytest.fixture
def model(shape: Shape, tokenizer: HuggingFaceTokenizer) -> TextModel:
    torch.manual_seed(0)
    module = CausalModel(shape).double().eval()
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return TextModel(module=module, tokenizer=tokenizer, origin="the model", chat_template=chat_of("chatml"))


class Scripted(TextModel):
    """Reads as the model does, and writes the tokens of a script; ``fed`` has the ids that it was given, in pieces."""

    @cached_property
    def fed(self) -> list[list[int]]:
        return []

    @cached_property
    def script(self) -> list[int]:
        return []

    @cached_property
    def true_logits(self) -> list[torch.Tensor]:
        return []

    def feed(self, ids: Any, states: Any) -> Any:
        logits, states = super().feed(ids, states)
        self.fed.append(list(ids))
        self.true_logits.append(logits)
        if self.script:
            # No other token can be drawn.
            logits = torch.full_like(logits, -torch.inf)
            logits[self.script.pop(0)] = 0.0
        return logits, states


@pytest.fixture
def scripted(model: TextModel) -> Scripted:
    return Scripted(**vars(model))


def say(model: Scripted, *answers: str) -> None:
    """Let ``model`` write these texts next, special tokens spelled."""
    assert isinstance(model.tokenizer, HuggingFaceTokenizer)
    for answer in answers:
        model.script.extend(model.tokenizer.encode_markup(answer, [])[0].tolist())
