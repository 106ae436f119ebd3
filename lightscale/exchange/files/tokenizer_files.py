"""A tokenizer as transformers reads it: tokenizer.json, which the package ``tokenizers`` runs, and its configuration.

Every kind encodes as before, id by id: what is written is compared with the original on texts that tokenizers often
treat unlike each other, and refused where one differs. Only a token that begins documents is added: a text of its own
begins with the end-of-text token, as in training. A text that spells a special token stays ordinary text, but where
masks are filled, and in models of conversations, whose templates spell them.
"""

import importlib
import json
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece.sentencepiece_model_pb2 as sentencepiece_model

from lightscale.data_pipeline.tokenizers import (
    END_OF_TEXT,
    AsciiTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
)
from lightscale.errors import UserError, shortened
from lightscale.evaluation.prediction.documents import MASK_TEXT, space_joins
from lightscale.training.checkpoints.reading import parse_object

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_NUM_TEXTS = 300


def write_tokenizer(
    tokenizer: Tokenizer, directory: Path, *, max_tokens: int, has_mask: bool = False, reads_markup: bool = False
) -> str:
    """Write both files to ``directory``; the spelling of the end-of-text token.

    Args:
        tokenizer: of the run.
        directory: where they go.
        max_tokens: the length of sequences that the model was trained on.
        has_mask: whether the mask is a token too, behind the last one: ``MASK_TEXT`` in a text is it.
        reads_markup: whether a text can spell special tokens, as a chat template does.

    UserError where the package ``tokenizers`` is not there, or would not give the same ids.
    """
    content = _content(tokenizer)
    eot = _spelling(content, tokenizer.eot_id)
    content["post_processor"] = _begins_with(eot, tokenizer.eot_id)
    content["truncation"] = content["padding"] = None
    text = json.dumps(content, ensure_ascii=False)
    _check(tokenizer, text)
    if has_mask:
        content["added_tokens"] = [*content["added_tokens"], _mask_token(tokenizer)]
        text = json.dumps(content, ensure_ascii=False)
    (directory / FILE).write_text(text, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eot,
        "eos_token": eot,
        "pad_token": eot,
        "clean_up_tokenization_spaces": False,
        # A text that spells a special token must not forge the end of a document. But masks and the markup of chat
        # templates are spelled, and transformers knows only all or none.
        "split_special_tokens": not has_mask and not reads_markup,
        "padding_side": "left",
        "model_max_length": max_tokens,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if has_mask:
        config["mask_token"] = MASK_TEXT
    (directory / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return eot


def _mask_token(tokenizer: Tokenizer) -> dict[str, Any]:
    how = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
    # Where words begin with a space, the one before a mask is part of it: what was hidden there had it too.
    return {"id": tokenizer.vocab_size, "content": MASK_TEXT, "lstrip": space_joins(tokenizer), **how}


def without_mask(content: bytes, mask: int, origin: Path) -> bytes:
    """``content`` of a tokenizer.json without its added token of the id ``mask``. UserError where it is none."""
    found = parse_object(content, origin)
    if isinstance(tokens := found.get("added_tokens"), list):
        found["added_tokens"] = [one for one in tokens if not (isinstance(one, dict) and one.get("id") == mask)]
    return json.dumps(found, ensure_ascii=False).encode()


def _content(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer as the content of a tokenizer.json."""
    if isinstance(tokenizer, TiktokenTokenizer):
        return _of_tiktoken(tokenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _of_sentencepiece(tokenizer)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        content: dict[str, Any] = json.loads(tokenizer.file)
        return content
    if isinstance(tokenizer, AsciiTokenizer):
        return _of_ascii(tokenizer)
    raise UserError(f"tokenizers of type {type(tokenizer).__name__} cannot be exported")


def _of_tiktoken(tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    ranks, special = tokenizer.mergeable_ranks, tokenizer.special_tokens
    spelled = _byte_spelling()
    vocabulary = {"".join(spelled[byte] for byte in token): rank for token, rank in ranks.items()}
    end = max(vocabulary.values()) + 1
    if sorted(vocabulary.values()) != list(range(end)) or min(special.values()) < end:
        # Added tokens come behind those of the model, in the order of their ids: gaps between them are filled.
        raise UserError(
            f"tokenizer {tokenizer.name}: tokenizer.json needs ranks 0 to {end - 1}, followed by all special tokens"
        )
    by_id = {number: token for token, number in special.items()}
    added = [(number, by_id.get(number, f"<|unused_{number}|>")) for number in range(end, max(by_id) + 1)]
    pre_tokenizer = {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": _oniguruma(tokenizer.pattern)},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    # tiktoken merges any neighbours that are a token together, in the order of that token's rank.
    merges = [
        ["".join(spelled[byte] for byte in part) for part in (token[:at], token[at:])]
        for token in sorted(ranks, key=ranks.__getitem__)
        for at in _splits(token, ranks)
    ]
    return {
        **_frame(added),
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        # A whole word that is a token is that token, whatever its bytes merge to.
        "model": _bpe(vocabulary, merges, ignore_merges=True),
    }


def _splits(token: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Where ``token`` can be cut into two tokens, in the order of their ranks."""
    cuts = [at for at in range(1, len(token)) if token[:at] in ranks and token[at:] in ranks]
    return sorted(cuts, key=lambda at: (ranks[token[:at]], ranks[token[at:]]))


def _oniguruma(pattern: str) -> str:
    """tiktoken's pattern for the regular expressions of ``tokenizers``, where two things are written otherwise.

    A possessive + behind {1,3} means "once or more of that" there. Without it the digits are taken greedily, and as
    nothing follows them in the patterns in use, the same are taken. What lets . stand for a line's end is m and not s.
    Whether both are the same is compared (``_check``).
    """
    return pattern.replace("{1,3}+", "{1,3}").replace("(?s:", "(?m:")


def _byte_spelling() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself, or where it cannot be printed the next."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    # Made by protobuf when it is imported: type checkers see nothing in it.
    form: Any = vars(sentencepiece_model)["ModelProto"]
    model, kinds = form.FromString(tokenizer.model), form.SentencePiece
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise UserError("the tokenizer is not a BPE model of sentencepiece; only BPE models can be exported")
    vocabulary: dict[str, int] = {}
    added, merged = [], []
    for number, entry in enumerate(model.pieces):
        # Spaces as they are, and not as U+2581: so that one in a text is in no token, and is written in its bytes.
        name = entry.piece
        if entry.type == kinds.NORMAL:
            name = name.replace("\u2581", " ")
            merged.append((-entry.score, number, name))
        elif entry.type in (kinds.CONTROL, kinds.UNKNOWN):
            added.append((number, name))
        vocabulary[name] = number
    known = {name for _, _, name in merged}
    merges = [
        [name[:at], name[at:]]
        for _, _, name in sorted(merged)
        for at in range(1, len(name))
        if name[:at] in known and name[at:] in known
    ]
    unknown = model.pieces[model.trainer_spec.unk_id].piece
    return {
        **_frame(added),
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": _bpe(vocabulary, merges, unk_token=unknown, byte_fallback=True),
    }


def _of_ascii(tokenizer: AsciiTokenizer) -> dict[str, Any]:
    eot, substitute = (tokenizer.eot_id, END_OF_TEXT), chr(int(tokenizer.encode("\ufffd")[0]))
    characters = {chr(number): number for number in range(tokenizer.vocab_size) if number != tokenizer.eot_id}
    decoders = [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": substitute}, "content": "\ufffd"}]
    return {
        **_frame([eot]),
        "normalizer": {"type": "Replace", "pattern": {"Regex": r"[^\x01-\x7f]"}, "content": substitute},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        # Without merges: every character by itself.
        "model": _bpe({eot[1]: eot[0], **characters}, []),
    }


def _frame(added: list[tuple[int, str]]) -> dict[str, Any]:
    """What every tokenizer.json has, with the special tokens ``added``."""
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens = [{"id": number, "content": name, **how} for number, name in sorted(added)]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": None}


def _bpe(vocabulary: dict[str, int], merges: list[list[str]], **how: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **how,
        "vocab": vocabulary,
        "merges": merges,
    }


def _spelling(content: dict[str, Any], number: int) -> str:
    """The special token with the id ``number``."""
    return next(str(token["content"]) for token in content["added_tokens"] if token["id"] == number)


def _begins_with(eot: str, number: int) -> dict[str, Any]:
    """A post-processor that puts ``eot`` before every text, unless it is asked for none."""
    first = {"SpecialToken": {"id": eot, "type_id": 0}}
    text, pair = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, first, pair],
        "special_tokens": {eot: {"id": eot, "ids": [number], "tokens": [eot]}},
    }


def _check(tokenizer: Tokenizer, content: str) -> None:
    """UserError unless the tokenizer.json ``content`` encodes and decodes as ``tokenizer`` does."""
    try:
        package = importlib.import_module("tokenizers")
    except ImportError as error:
        raise UserError("an export needs the package tokenizers: pip install 'lightscale[hf]'") from error
    try:
        exported = package.Tokenizer.from_str(content)
    except Exception as error:
        raise UserError(
            f"the tokenizer {tokenizer.name} cannot be exported: the package tokenizers cannot read it "
            f"({shortened(str(error))})"
        ) from error
    exported.encode_special_tokens = True
    for text in comparison_texts():
        expected = tokenizer.encode(text)
        if (found := exported.encode(text, add_special_tokens=False).ids) != expected:
            raise UserError(
                f"the tokenizer {tokenizer.name} cannot be exported: {shortened(repr(text), 80)} encodes to "
                f"{shortened(str(found), 80)} in tokenizer.json and {shortened(str(expected), 80)} in training"
            )
        if exported.decode(expected, skip_special_tokens=False) != tokenizer.decode(expected):
            raise UserError(
                f"the tokenizer {tokenizer.name} cannot be exported: {shortened(repr(text), 80)} is decoded differently"
            )


def comparison_texts(number: int = _NUM_TEXTS, seed: int = 0) -> Iterator[str]:
    """Texts that tokenizers treat unlike each other, always the same: spaces, digits, cases, scripts, random ones."""
    yield from (
        "",
        " ",
        " a  b ",
        "\t\r\n\n\x00",
        "\u2581 \uff21\u3000\u00e9e\u0301\ufb01",
        "</s><unk><0x41><|endoftext|>",
        "\U0001f600\ufffd\u200d\u0130\u017f\u212a",
        "1 12 123 1234 12345 123456789 \u0661\u0662\u0663\u0664 ²³¼½",
        "I'm we'll you'RE he'S they'D it'\u017f o'\u212a don't DON'T l'\u00e9t\u00e9",
        "def f(x):\n    return  x\n\n\n\tx  +=\t1  \r\n  ",
        "a" * 300 + " " * 300 + "\u00e9" * 300 + "\n" * 40,
        "Ελληνικά русский 中文字 日本語 한국어 हिन्दी العربية ไทย",
    )
    generator = random.Random(seed)
    for _ in range(number):
        yield "".join(_character(generator) for _ in range(generator.randint(1, 60)))


def _character(generator: random.Random) -> str:
    kind = generator.random()
    if kind < 0.5:
        return chr(generator.randrange(128))
    if kind < 0.7:
        return generator.choice("  \n\t'\u00a0\u2028.,0123456789")
    while True:
        code = generator.randrange(0x3000 if kind < 0.9 else 0x110000)
        # Surrogates are no characters.
        if unicodedata.category(chr(code)) != "Cs":
            return chr(code)
