"""An exported directory, opened: its configuration, tokenizer and tensors. Nothing in it is executed."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.chat.recorded import kept_template
from lightscale.data_pipeline.tokenizers import HuggingFaceTokenizer, NoText, Tokenizer, load_tokenizer
from lightscale.data_pipeline.tokenizers.interface import read_file
from lightscale.errors import UserError
from lightscale.exchange.files import export_config, own_vit, tokenizer_files
from lightscale.exchange.files.checksums import require_unchanged
from lightscale.exchange.files.own_classes import renamed_and_recut, tensor_places, whole_shapes
from lightscale.exchange.files.safetensors_files import INDEX, SINGLE, open_shard, read_shards
from lightscale.exchange.files.stored_tensors import StoredTensors
from lightscale.exchange.files.weights import TensorRows, tensor_shapes
from lightscale.exchange.plain.model import MIXER_NAMES, SOFTMAX_MIXERS, Shape
from lightscale.training.checkpoints.header import Entry
from lightscale.training.checkpoints.reading import parse_object

TOKENIZER = "tokenizer"
"""The folder with the tokenizer as the run had it, beside the files that transformers reads."""
_OF_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_COMPUTED = ".rotary_emb.inv_freq"
"""What older versions of transformers saved beside the weights, and follows from the configuration."""
_MOST_PADDING = 1024


@dataclass(frozen=True, kw_only=True)
class Export:
    """A whole export."""

    origin: Path
    shape: Shape
    max_tokens: int
    """The length of sequences that the model was trained on."""
    tokenizer: Tokenizer
    tensors: StoredTensors
    places: dict[str, TensorRows]
    """Where the files have the tensors of the plain model."""
    classes: tuple[str, ...] = ()
    chat: Chat | None = None
    """The chat template, as lightscale has kept it, or as the tokenizer's files have it."""
    refused: tuple[str, ...] = ()

    @property
    def context(self) -> int | None:
        """See ``OpenedModel``."""
        return self.max_tokens if {*self.shape.mixers} & {*SOFTMAX_MIXERS} else None

    def rows(self, name: str) -> TensorRows:
        """Where the weight ``name`` of the plain model is; of the vocabulary's rows, those in use."""
        place = self.places[name]
        return replace(place, ranges=((0, self.shape.vocab_size),)) if name in _OF_VOCABULARY else place

    def read(self, name: str) -> Tensor:
        """See ``OpenedModel``."""
        found = self.tensors.read(self.rows(name))
        # Convolutions (c, 1, w) of transformers' own classes.
        return found.flatten(1) if self.places[name].key.endswith("conv1d.weight") else found


def is_export(path: Path) -> bool:
    """Whether ``path`` is a directory that a model was exported to, as far as its names say."""
    return (path / export_config.NAME).is_file() and not (path / "config.toml").exists()


def open_export(directory: Path) -> Export:
    """The model in ``directory``, which lightscale or transformers has written.

    UserError where there is none, one of another architecture, or its files are damaged, do not fit each other, or are
    not those of XXH128SUMS.
    """
    if not (directory / export_config.NAME).is_file():
        raise UserError(f"{directory}: no model; expected {export_config.NAME} and files of tensors")
    if not any((directory / name).exists() for name in (SINGLE, INDEX)):
        pickles = sorted(path.name for suffix in ("bin", "pt", "pth") for path in directory.glob(f"*.{suffix}"))
        why = f"; {pickles[0]} could run code when loaded and is not read" if pickles else ""
        raise UserError(f"{directory}: has neither {SINGLE} nor {INDEX}{why}; save the model as safetensors")
    shape, max_tokens, own_type = export_config.read_config(directory / export_config.NAME)
    if unknown := [name for name in shape.mixers if name not in MIXER_NAMES]:
        raise UserError(
            f"{directory / export_config.NAME}: unknown mixer {unknown[0]!r}; use one of {', '.join(MIXER_NAMES)}"
        )
    headers = {
        name: [entry for entry in entries if not entry.box.key.endswith(_COMPUTED)]
        for name, entries in read_shards(directory).items()
    }
    places, tensors = _tensors(directory, shape, own_type, headers)
    is_masked = shape.task == "masked"
    tokenizer = _tokenizer(directory, shape)
    # Published models have unused rows beyond their vocabulary; exports of lightscale have none.
    most = shape.vocab_size - is_masked
    padding = 0 if is_masked or (directory / TOKENIZER).is_dir() else _MOST_PADDING
    if shape.image is None and not most - padding <= tokenizer.vocab_size <= most:
        raise UserError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} ids, and the model an embedding of "
            f"{shape.vocab_size}{', of which one row is the mask' * is_masked}; they belong to different models"
        )
    if shape.image is None:
        shape = replace(shape, vocab_size=tokenizer.vocab_size + is_masked)
    # Last: whatever else is wrong has a better message.
    require_unchanged(directory)
    return Export(
        origin=directory,
        shape=shape,
        max_tokens=max_tokens,
        tokenizer=tokenizer,
        tensors=tensors,
        places=places,
        classes=_classes(directory, shape),
        chat=kept_template(directory),
    )


def _classes(directory: Path, shape: Shape) -> tuple[str, ...]:
    return tuple(export_config.class_names(directory / export_config.NAME)) if shape.num_labels else ()


def _tensors(
    directory: Path, shape: Shape, own_type: str | None, headers: dict[str, list[Entry]]
) -> tuple[dict[str, TensorRows], StoredTensors]:
    """Where the files have the tensors of the plain model, and these files. UserError for those of another model."""
    if own_type == own_vit.TYPE:
        assert shape.image is not None
        places = own_vit.places(shape)
        tensors: StoredTensors = own_vit.ViTTensors(directory, own_vit.plain_entries(headers), open_shard)
        tensors.image = shape.image  # type: ignore[attr-defined]
        expected = {places[name].key: size for name, size in tensor_shapes(shape).items()}
    else:
        places = tensor_places(shape, own_type)
        expected = whole_shapes(places, tensor_shapes(shape))
        tensors = StoredTensors(directory, renamed_and_recut(headers, expected, own_type), open_shard)
    tensors.check({name: TensorRows(key=name) for name in expected}, expected)
    return places, tensors


def _tokenizer(directory: Path, shape: Shape) -> Tokenizer:
    if (directory / TOKENIZER).is_dir():
        return load_tokenizer(directory)
    if shape.image is not None:
        return NoText()
    path = directory / tokenizer_files.CONFIG
    eos = parse_object(read_file(path), path).get("eos_token")
    # Also written as an object with the token's properties.
    name = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(name, str):
        raise UserError(f"{path}: no eos_token to end documents")
    file = directory / tokenizer_files.FILE
    content = read_file(file)
    if shape.task == "masked":
        # The mask is no token of texts.
        content = tokenizer_files.without_mask(content, shape.vocab_size - 1, file)
    return HuggingFaceTokenizer(content, origin=str(file), end_of_text=name)
