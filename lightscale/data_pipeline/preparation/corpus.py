"""The inputs of a store: the typed form of a corpus file.

    tokenizer = "tiktoken:cl100k_base"
    validation = 0.01

    [sources.wiki]
    paths = ["wiki/*.jsonl.zst", "more/"]
    language = "en"
    weight = 0.7

    [sources.novels]
    paths = ["novels.parquet"]
    language = "zh"
    weight = 0.3
    text_field = "content"
    filters = {size = {min = 200}, stop_words = false}

Paths are relative to the file. Sources are processed in the order of the file, which matters for duplicates: of
duplicates the first document is kept.
"""

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator, model_validator

from lightscale.config.fields import field_type_text, shown_key, shown_value, table_type
from lightscale.config.files import mistakes
from lightscale.config.section import MOST_ENTRIES, Fraction, Ids, Positive, Section, SequenceLength
from lightscale.config.text import path_fault
from lightscale.config.toml import read_toml
from lightscale.data_pipeline.chat.counted import Loss
from lightscale.data_pipeline.chat.files import TemplateFiles, find_template
from lightscale.data_pipeline.chat.named import NAMED
from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.chat.shapes import USUAL_FIELDS
from lightscale.data_pipeline.preparation.filters import Chain, compose, sha256_of, with_base
from lightscale.data_pipeline.preparation.labels import MOST_CHARACTERS, MOST_CLASSES, is_name
from lightscale.data_pipeline.preparation.readers.inputs import MAX_DOCUMENT_BYTES, ReadOptions
from lightscale.data_pipeline.preparation.readers.remote import is_remote
from lightscale.data_pipeline.preparation.readers.table import (
    CHAT,
    DEFAULT_SUFFIXES,
    FORMATS,
    PREFERENCE,
    RECORD_FORMATS,
    suffixes_of,
)
from lightscale.data_pipeline.store.format import CHUNK_TOKENS, SHARD_TOKENS, VALIDATION_SUFFIX, check_source_name
from lightscale.errors import UserError, shortened

DEFAULT_VOCAB_SIZE = 4096
TRAINED_TOKENIZER = "sentencepiece"
ASCII_TOKENIZER = "ascii"
BYTE_TOKENIZER = "bytes"
_NAMED_TOKENIZERS = (TRAINED_TOKENIZER, ASCII_TOKENIZER, BYTE_TOKENIZER)
# Weights are rounded by hand: 0.333 + 0.333 + 0.334 and three times 0.3333 are both meant as 1.
_WEIGHT_TOLERANCE = 1e-3

_Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_ENTRIES)]
# As many bytes of 4 as compressors take at once, less than 2 GiB; and as a file system takes in one file.
_MOST_CHUNK_TOKENS, _MOST_SHARD_TOKENS = 2**28, 2**34
# Records of documents have lengths of 32 bits, and a line of JSON may be four times as long.
_MOST_DOCUMENT_BYTES = 2**29
# The index of a shard has an entry for each of its chunks.
_MOST_CHUNKS = 2**20

ClassName = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
"""The name of a class, which a file may have as a whole number."""
Language = Literal["en", "zh", "code", "other"]


class ChatConfig(Section):
    """[sources.NAME.chat]: how conversations become texts, and which of their tokens count for the loss."""

    template: str | None = None
    """Chat template: chatml, llama3, qwen, or the path of a template, of a tokenizer_config.json or of their directory;
    none: that beside the tokenizer's file.
    """
    loss: Loss = "assistant"
    """Tokens that count: all of the assistant's messages, of the last one only, or those of users too. Messages of the
    system and of tools never count.
    """
    max_tokens: SequenceLength | None = None
    """Maximum length of a conversation in tokens, its end-of-text token included; none: any length."""
    too_long: Literal["refuse", "cut"] = "refuse"
    """Longer conversations: refuse the corpus, or cut them at max_tokens."""
    fields: Annotated[dict[str, str], Field(max_length=MOST_ENTRIES)] = Field(default_factory=dict)
    """Names of fields in the files, by their usual names, such as messages, role, content, from, value, instruction,
    input, output, prompt, completion, system, tools, chosen, rejected.
    """
    roles: Annotated[dict[str, str], Field(max_length=MOST_ENTRIES)] = Field(default_factory=dict)
    """Roles by their names in the files, such as client = "user"; ShareGPT's are known."""
    variables: Annotated[dict[str, str | bool | int | float], Field(max_length=MOST_ENTRIES)] = Field(
        default_factory=dict
    )
    """Further variables of the template, such as date_string or enable_thinking."""

    @field_validator("fields")
    @classmethod
    def _check_fields(cls, fields: dict[str, str]) -> dict[str, str]:
        if unknown := [name for name in fields if name not in USUAL_FIELDS]:
            raise ValueError(f"{shown_value(unknown[0])} is not a usual name; use one of {', '.join(USUAL_FIELDS)}")
        return fields

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str | None) -> str | None:
        if template is not None and (fault := path_fault(template)):
            raise ValueError(f"{shown_value(template)} {fault}")
        return template

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.too_long == "cut" and self.max_tokens is None:
            raise ValueError('too_long = "cut" needs max_tokens, the length of a sequence of the training')
        return self


class SourceConfig(Section):
    """[sources.NAME]: texts of one kind, which become one source of the store."""

    paths: _Texts
    """Files, directories, URLs and patterns (*, ?, [], **) of the texts; "python:stdlib": sources of the standard
    library.
    """
    language: Language | None = None
    """Language whose rules filter the documents; none: no document is filtered."""
    weight: Positive | None = None
    """Share of the training samples; set for all sources (they add up to 1) or for none."""
    text_field: str = "text"
    """Field of objects, column of tables that holds the text; a.b is field b of field a."""
    text_pair_field: str | None = None
    """Field or column of a second text: documents are pairs of texts that share label_field and stay together; none:
    single texts."""
    max_tokens: Annotated[SequenceLength, Field(ge=2)] | None = None
    """With text_pair_field: length at which each text is cut, in tokens, its end-of-text token included; none: whole
    texts."""
    columns: Annotated[list[str], Field(min_length=1, max_length=MOST_ENTRIES)] | None = None
    """Columns of csv and tsv files without a header; quotes of such a tsv file are text; none: the first record names
    them."""
    format: str | None = None
    """Format of the files (preparation/readers/table.py lists all); none: detected by suffix; chat: conversations;
    preference: pairs of answers to one prompt.
    """
    chat: ChatConfig = ChatConfig()
    """With format = "chat" or "preference": template and loss of the conversations."""
    id_field: str | None = None
    """Field of jsonl objects and column of parquet files with an id or URL to store; none: no id is stored."""
    label_field: str | None = None
    """Field of jsonl objects and column of parquet files with the class of each document; of text files, folder is the
    name of their folder; none: no classes."""
    suffixes: _Texts = Field(default_factory=lambda: list(DEFAULT_SUFFIXES))
    """Suffixes of the files to read in directories; with ``format``, the default is the suffixes of the format."""
    validation: Fraction | None = None
    """Share of the documents to hold out; none: ``validation`` of the corpus."""
    filters: Any = Field(default_factory=dict)
    """Changes to the language's rules, a table of RULE = false, true or limits; or, in place of the rules, a filter's
    name, or a list of names and tables FILTER = options (``filters/README.md``).
    """

    @field_validator("paths")
    @classmethod
    def _check_paths(cls, paths: list[str]) -> list[str]:
        for path in paths:
            if fault := path_fault(path):
                raise ValueError(f"{shown_value(path)} {fault}")
        return paths

    @field_validator("suffixes")
    @classmethod
    def _check_suffixes(cls, suffixes: list[str]) -> list[str]:
        if "" in suffixes:
            raise ValueError('"" matches every file; use suffixes like ".txt"')
        return suffixes

    @model_validator(mode="before")
    @classmethod
    def _suffixes_of_format(cls, table: Any) -> Any:
        if isinstance(table, dict) and "suffixes" not in table and table.get("format") in (*FORMATS, CHAT, PREFERENCE):
            formats = RECORD_FORMATS if table["format"] in (CHAT, PREFERENCE) else (table["format"],)
            return {**table, "suffixes": [suffix for name in formats for suffix in suffixes_of(FORMATS[name])]}
        return table

    @field_validator("format")
    @classmethod
    def _check_format(cls, name: str | None) -> str | None:
        names = (*FORMATS, CHAT, PREFERENCE)
        if name is not None and name not in names:
            raise ValueError(f"{shown_value(name)} is not a format; use one of {', '.join(names)}")
        return name

    @property
    def is_chat(self) -> bool:
        """Whether its documents are conversations."""
        return self.format in (CHAT, PREFERENCE)

    @model_validator(mode="after")
    def _check(self) -> Self:
        compose(self.filters, self.language)
        if self.is_chat and (self.language is not None or self.filters):
            raise ValueError(
                f'format = "{self.format}": filters read texts, not conversations; remove language and filters'
            )
        if self.format == PREFERENCE and (self.chat.loss == "all" or self.chat.too_long == "cut"):
            raise ValueError('format = "preference": the last answers count, whole; remove chat.loss and chat.too_long')
        if not self.is_chat and self.chat != ChatConfig():
            raise ValueError('chat: the table is for conversations; set format = "chat" or "preference", or remove it')
        if self.label_field in self.text_fields:
            raise ValueError(
                f"label_field = {shown_value(self.label_field)} is also text_field; use the field of the classes"
            )
        self._check_pairs()
        return self

    @property
    def has_text_pairs(self) -> bool:
        """Whether its documents are pairs of texts."""
        return self.text_pair_field is not None

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Of the one text, or of both."""
        return (self.text_field,) if self.text_pair_field is None else (self.text_field, self.text_pair_field)

    def _check_pairs(self) -> None:
        if self.columns is not None:
            if self.is_chat or self.format not in (None, "csv", "tsv"):
                raise ValueError(f'columns: format = "{self.format}" names its fields; remove columns')
            named = (*self.text_fields, self.id_field, self.label_field)
            if missing := [name for name in named if name is not None and name not in self.columns]:
                raise ValueError(f"columns: {shown_value(missing[0])} is none of {', '.join(self.columns)}; add it")
        if not self.has_text_pairs:
            if self.max_tokens is not None:
                raise ValueError("max_tokens cuts the texts of pairs; set text_pair_field, or remove max_tokens")
            return
        if self.text_pair_field == self.text_field:
            raise ValueError(f"text_pair_field = {shown_value(self.text_pair_field)} is also text_field; use another")
        if self.is_chat:
            raise ValueError(f'text_pair_field: format = "{self.format}" reads conversations; remove text_pair_field')
        if self.format is not None and self.format not in RECORD_FORMATS:
            raise ValueError(
                f'text_pair_field: files of format = "{self.format}" hold one text each; use one of '
                f"{', '.join(RECORD_FORMATS)}"
            )
        if self.language is not None or self.filters:
            raise ValueError("text_pair_field: filters read single texts, not pairs; remove language and filters")


class DuplicatesConfig(Section):
    """[duplicates]: which documents are dropped as duplicates of an earlier document of any source."""

    exact: bool = True
    """Drop documents with identical text."""
    near: bool = True
    """Drop documents that share most of their sequences of five tokens; not conversations, not pairs of texts."""
    keep_keys: bool = True
    """Store the keys that find duplicates of its documents in other files; `data add` needs them. At most 128 bytes per
    document.
    """


class Corpus(Section):
    """A corpus file."""

    tokenizer: str = TRAINED_TOKENIZER
    """sentencepiece, trained on the corpus; tiktoken:ENCODING; ascii, a token for each character; bytes, a token
    for each byte; or the path of a store or a tokenizer's file."""
    vocab_size: Ids | None = None
    """Vocabulary size of a tokenizer trained here, special tokens included; none: 4096."""
    validation: Fraction = 0.0
    """Share of the documents to hold out as the sources NAME-validation."""
    max_document_bytes: Annotated[int, Field(ge=1, le=_MOST_DOCUMENT_BYTES)] = MAX_DOCUMENT_BYTES
    """Maximum size of a text; longer texts are counted and skipped. Each process needs about 20 bytes of memory per
    byte.
    """
    classes: Annotated[list[ClassName], Field(min_length=1, max_length=MOST_CLASSES)] | None = None
    """Names of the classes in the sources' label_field, in the order of their numbers; none: those found, sorted."""
    duplicates: DuplicatesConfig = DuplicatesConfig()
    """Which documents count as duplicates."""
    shard_tokens: Annotated[int, Field(ge=1, le=_MOST_SHARD_TOKENS)] = SHARD_TOKENS
    """Length of a shard file, in tokens."""
    chunk_tokens: Annotated[int, Field(ge=1, le=_MOST_CHUNK_TOKENS)] = CHUNK_TOKENS
    """Length of zarr's chunks, in tokens; divides shard_tokens."""
    sources: Annotated[dict[str, SourceConfig], Field(min_length=1, max_length=MOST_ENTRIES)]
    """The texts, by the name of their source."""

    @property
    def weights(self) -> dict[str, float] | None:
        """Default share of every source in the training samples; none: by their tokens."""
        weights = {name: source.weight for name, source in self.sources.items() if source.weight is not None}
        return weights or None

    def read_options(self, source: str) -> ReadOptions:
        """The fields to read from the files of ``source``."""
        config = self.sources[source]
        return ReadOptions(
            text_field=config.text_field,
            text_pair_field=config.text_pair_field,
            columns=None if config.columns is None else tuple(config.columns),
            id_field=config.id_field,
            label_field=config.label_field,
            format=None if config.is_chat else config.format,
            has_records=config.is_chat,
            max_document_bytes=self.max_document_bytes,
        )

    def chats(self) -> dict[str, Chat]:
        """How conversations become texts, by source; reads templates. Raises ``UserError`` for one with a fault."""
        is_named = self.tokenizer in _NAMED_TOKENIZERS or self.tokenizer.startswith("tiktoken:")
        tokenizer = None if is_named else Path(self.tokenizer)
        chats = {}
        for name, source in self.sources.items():
            if source.is_chat:
                try:
                    chats[name] = self.chat_of(name, find_template(source.chat.template, tokenizer))
                    chats[name].check()
                except UserError as error:
                    raise UserError(f"sources.{name}: {error}") from error
        return chats

    def chat_of(self, source: str, files: TemplateFiles) -> Chat:
        """How conversations of ``source`` become texts with the template in ``files``."""
        config, has_pairs = self.sources[source].chat, self.sources[source].format == PREFERENCE
        return Chat(
            files=files,
            loss="last" if has_pairs else config.loss,
            fields=config.fields,
            roles=config.roles,
            variables=config.variables,
            most_characters=self.max_document_bytes,
            has_pairs=has_pairs,
        )

    def filter_of(self, source: str) -> Chain | None:
        """The filters of ``source``; None: every document is kept."""
        config = self.sources[source]
        return compose(config.filters, config.language)

    def filter_files(self) -> dict[str, str]:
        """The files that filters read, with the sha256 of each. Raises ``UserError`` for one that cannot be read."""
        chains = [self.filter_of(name) for name in self.sources]
        return {file: sha256_of(file) for chain in chains if chain is not None for file in chain.files()}

    def validation_of(self, source: str) -> float:
        """Share of the documents of ``source`` that are held out."""
        own = self.sources[source].validation
        return self.validation if own is None else own

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shard_tokens % self.chunk_tokens:
            raise ValueError(
                f"shard_tokens = {self.shard_tokens} is not a multiple of chunk_tokens = {self.chunk_tokens}; "
                f"use {-(-self.shard_tokens // self.chunk_tokens) * self.chunk_tokens}"
            )
        if self.shard_tokens // self.chunk_tokens > _MOST_CHUNKS:
            raise ValueError(
                f"shard_tokens = {self.shard_tokens} gives more than {_MOST_CHUNKS:_} chunks of chunk_tokens = "
                f"{self.chunk_tokens} per shard; use chunk_tokens = {CHUNK_TOKENS}"
            )
        if not self.tokenizer.startswith("tiktoken:") and (fault := path_fault(self.tokenizer)):
            raise ValueError(f"tokenizer = {shown_value(self.tokenizer)}: {fault}")
        if self.vocab_size is not None and self.tokenizer != TRAINED_TOKENIZER:
            raise ValueError(
                f'vocab_size = {self.vocab_size}: tokenizer "{self.tokenizer}" has a fixed vocabulary; remove one of '
                f"the two keys"
            )
        _check_names(list(self.sources))
        _check_classes(self.classes, [name for name, source in self.sources.items() if source.label_field is not None])
        _check_weights({name: source.weight for name, source in self.sources.items()})
        return self


def load_corpus(path: Path) -> Corpus:
    """The corpus in the file ``path``, with its relative paths made absolute.

    Raises ``UserError`` with one line per mistake: file, key, value and remedy.
    """
    try:
        table = read_toml(path, what="a corpus file")
    except OSError as error:
        raise UserError(f"cannot read the corpus file {shortened(str(path))}: {error.strerror}") from error
    corpus = make_corpus(table, origin=str(path))
    base = path.resolve().parent
    sources = {
        name: source.model_copy(
            update={
                "paths": [_absolute(base, entry) for entry in source.paths],
                "filters": with_base(source.filters, base),
                "chat": source.chat.model_copy(update={"template": _template(base, source.chat.template)}),
            }
        )
        for name, source in corpus.sources.items()
    }
    # Only the path of a tokenizer is relative to the file; the other forms are names.
    tokenizer = corpus.tokenizer
    if tokenizer not in _NAMED_TOKENIZERS and not tokenizer.startswith("tiktoken:"):
        tokenizer = str(base / tokenizer)
    return corpus.model_copy(update={"sources": sources, "tokenizer": tokenizer})


def make_corpus(table: dict[str, Any], *, origin: str) -> Corpus:
    """The corpus of a parsed TOML ``table``; ``origin`` begins the lines of a ``UserError``."""
    try:
        return Corpus.model_validate(table)
    except ValidationError as error:
        raise UserError(mistakes(error, lambda item: f"{origin}: {_explain(item, table)}")) from None


def _template(base: Path, template: str | None) -> str | None:
    return template if template is None or template in NAMED else _absolute(base, template)


def _absolute(base: Path, entry: str) -> str:
    if entry.startswith("python:") or is_remote(entry):
        return entry
    try:
        return str(base / Path(entry).expanduser())
    except RuntimeError as error:
        raise UserError(f"{base}: the path {shown_value(entry)} of the corpus: {error}; write the full path") from None


def _check_names(names: list[str]) -> None:
    for name in names:
        check_source_name(name)
        if name.endswith(VALIDATION_SUFFIX) and name.removesuffix(VALIDATION_SUFFIX) in names:
            raise ValueError(
                f"sources.{name}: this name is reserved for the held-out documents of "
                f"{name.removesuffix(VALIDATION_SUFFIX)}; use another name"
            )


def _check_classes(classes: Sequence[str] | None, labelled: Sequence[str]) -> None:
    if classes is None:
        return
    if not labelled:
        raise ValueError("classes, but no source has a label_field; set label_field in a source")
    if wrong := [name for name in classes if not is_name(name)]:
        raise ValueError(
            f"classes: {shown_value(wrong[0])} must be a whole number, or a string of 1 to {MOST_CHARACTERS} printable "
            "characters"
        )
    if twice := [name for name, count in Counter(classes).items() if count > 1]:
        raise ValueError(f"classes: {shown_value(twice[0])} is listed twice; list each class once")


def _check_weights(weights: dict[str, float | None]) -> None:
    given = {name: weight for name, weight in weights.items() if weight is not None}
    if not given:
        return
    if missing := [name for name in weights if name not in given]:
        raise ValueError(
            f"weight: {', '.join(given)} {'has' if len(given) == 1 else 'have'} a weight, {', '.join(missing)} not; "
            f"set it for all sources or for none (every token then counts the same)"
        )
    total = math.fsum(given.values())
    if abs(total - 1) > _WEIGHT_TOLERANCE:
        shares = ", ".join(f"{name} = {weight / total:.4g}" for name, weight in given.items())
        found = " + ".join(f"{weight:g}" for weight in given.values())
        raise ValueError(f"weight: {found} is {total:.6g}, but weights must add up to 1; use {shares}")


def _explain(error: dict[str, Any], table: dict[str, Any]) -> str:
    """One line for one of pydantic's errors."""
    key, expected, siblings = _locate(error["loc"])
    value: Any = table
    for part in key:
        value = value.get(part) if isinstance(value, dict) else None
    name = shown_key(key)
    if error["type"] == "value_error":
        text = shortened(str(error["ctx"]["error"]), 1000)
        return f"{name}: {text}" if name else text
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key[-1], siblings, n=1)
        return f"unknown key {name}; " + (f"did you mean {near[0]}?" if near else f"use one of {', '.join(siblings)}")
    if value is None:
        return f"{name} is missing; it must be {expected}"
    return f"{name} = {shown_value(value)}: must be {expected}" + (", not empty" if value in ([], {}) else "")


def _locate(location: tuple[int | str, ...]) -> tuple[tuple[str, ...], str, list[str]]:
    """The key that pydantic's ``location`` lies in, what it takes, and the keys beside it."""
    section: type[BaseModel] | None = Corpus
    key: list[str] = []
    expected, siblings = "a table", list(Corpus.model_fields)
    parts = iter(map(str, location))
    for part in parts:
        if section is None:
            break
        siblings = list(section.model_fields)
        key.append(part)
        field = section.model_fields.get(part)
        if field is None:
            break
        expected = field_type_text(field) if field.annotation is not Any else "a table, a name or a list"
        section, named = table_type(field.annotation)
        if named and (name := next(parts, None)) is not None:
            key.append(name)
            expected = "a table"
    return tuple(key), expected, siblings
