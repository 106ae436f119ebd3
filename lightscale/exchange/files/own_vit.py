"""ViT as transformers' own class: config.json, names of weights, and how their files hold them.

Files have the names of published models (google/vit-base-patch16-224), which all versions of transformers read. The map
of patches is a convolution there, whose channels precede the pixels.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from lightscale.config.section import MOST_LAYERS
from lightscale.errors import UserError
from lightscale.exchange.files.config_fields import Eps, Width
from lightscale.exchange.files.image_processor import read_scaling
from lightscale.exchange.files.stored_tensors import StoredTensors
from lightscale.exchange.files.weights import TensorRows, tensor_shapes
from lightscale.exchange.plain.model import Shape
from lightscale.exchange.plain.patches import ImageInputs
from lightscale.exchange.plain.softmax_mixer import Attention
from lightscale.training.checkpoints.directories import WEIGHTS_PREFIX
from lightscale.training.checkpoints.header import Entry
from lightscale.training.checkpoints.schema import checked

TYPE = "vit"
"""Of config.json's model_type."""
_ARCHITECTURE = "ViTForImageClassification"
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
_CONVOLUTION = "vit.embeddings.patch_embeddings.projection.weight"
_WHOLE = {
    "model.embed_patches.leading": "vit.embeddings.cls_token",
    "model.positions.weight": "vit.embeddings.position_embeddings",
    "model.embed_patches.projection.weight": _CONVOLUTION,
    "model.embed_patches.projection.bias": "vit.embeddings.patch_embeddings.projection.bias",
    "model.norm.weight": "vit.layernorm.weight",
    "model.norm.bias": "vit.layernorm.bias",
    "score.weight": "classifier.weight",
    "score.bias": "classifier.bias",
}
_OF_LAYER = {
    "mixer.q_proj": "attention.attention.query",
    "mixer.k_proj": "attention.attention.key",
    "mixer.v_proj": "attention.attention.value",
    "mixer.o_proj": "attention.output.dense",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "input_layernorm": "layernorm_before",
    "post_attention_layernorm": "layernorm_after",
}
_NEWER = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
"""Names of layers in transformers 5, and those of files."""


def _pair(value: Any) -> Any:
    return [value, value] if isinstance(value, int) else value


_Pair = Annotated[list[Width], BeforeValidator(_pair), Field(min_length=2, max_length=2)]


class _ViT(BaseModel):
    """config.json, with transformers' defaults."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    architectures: Annotated[list[str], Field(min_length=1, max_length=1)]
    hidden_size: Width = 768
    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 12
    num_attention_heads: Width = 12
    intermediate_size: Width = 3072
    hidden_act: Literal["gelu", "gelu_pytorch_tanh", "silu"] = "gelu"
    layer_norm_eps: Eps = 1e-12
    image_size: _Pair = [224, 224]
    patch_size: _Pair = [16, 16]
    num_channels: Literal[1, 3] = 3
    qkv_bias: Literal[True] = True
    id2label: dict[str, str] = Field(default={}, max_length=1_000_000)


def read(content: dict[str, Any], path: Path) -> Shape:
    """The model of ``content``, the config.json at ``path``; UserError for one without classes."""
    own = checked(_ViT, content, path)
    if own.architectures != [_ARCHITECTURE]:
        raise UserError(f"{path}: architectures = {own.architectures}; use {_ARCHITECTURE}")
    (height, width), (h, w) = own.image_size, own.patch_size
    if height % h or width % w:
        raise UserError(f"{path}: patch_size = {own.patch_size} does not divide image_size = {own.image_size}")
    mean, std = read_scaling(path.parent, own.num_channels)
    image = ImageInputs(
        grid=(height // h, width // w),
        patch_size=(h, w),
        num_channels=own.num_channels,
        leading_tokens=1,
        image_mean=mean,
        image_std=std,
    )
    return _shape(own, image)


def _shape(own: _ViT, image: ImageInputs) -> Shape:
    return Shape(
        vocab_size=0,
        hidden_size=own.hidden_size,
        num_attention_heads=own.num_attention_heads,
        intermediate_size=own.intermediate_size,
        mixers=("llama",) * own.num_hidden_layers,
        glu_activation=_ACTIVATIONS[own.hidden_act],
        gated_linear_unit=False,
        mlp_bias=True,
        norm="layernorm",
        norm_elementwise_affine=True,
        rms_norm_eps=own.layer_norm_eps,
        attention=Attention(causal=False, positions="none", bias=True, output_bias=True),
        learned_positions=image.tokens,
        task="classify-image",
        num_labels=len(own.id2label) or 2,
        pooling="first",
        head_bias=True,
        image=image,
    )


def _keys(shape: Shape, image: ImageInputs) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    (height, width), (h, w) = image.image_size, image.patch_size
    return {
        "architectures": [_ARCHITECTURE],
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": len(shape.mixers),
        "num_attention_heads": shape.num_attention_heads,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": names.get(shape.glu_activation, "gelu"),
        "layer_norm_eps": shape.rms_norm_eps,
        # Published models have numbers.
        "image_size": height if height == width else [height, width],
        "patch_size": h if h == w else [h, w],
        "num_channels": image.num_channels,
        "qkv_bias": True,
    }


def computes(shape: Shape) -> bool:
    """Whether transformers' class computes ``shape``: what its configuration says reads as the same shape."""
    if shape.image is None or not shape.intermediate_size:
        return False
    labels = {str(number): "" for number in range(shape.num_labels)}
    own = _ViT.model_validate(_keys(shape, shape.image) | {"id2label": labels})
    # What is tied is an embedding of ids, which images have none of.
    return _shape(own, replace(shape.image, leading_tokens=1, overlap=0)) == replace(shape, tied=True)


def config_of(shape: Shape, common: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json but for the classes; ``common``: keys of all models."""
    assert shape.image is not None, "computes"
    kept = {key: value for key, value in common.items() if key in ("dtype", "initializer_range")}
    return {"model_type": TYPE, **kept, **_keys(shape, shape.image)}


def places(shape: Shape) -> dict[str, TensorRows]:
    """Of every tensor of the plain model, where the files have it."""
    found = {}
    for name in tensor_shapes(shape):
        key = _WHOLE.get(name)
        if key is None:
            _, _, layer, *part, kind = name.split(".")
            key = f"vit.encoder.layer.{layer}.{_OF_LAYER['.'.join(part)]}.{kind}"
        found[name] = TensorRows(key=key)
    return found


def file_shape(key: str, plain: tuple[int, ...], image: ImageInputs) -> tuple[int, ...]:
    """Of the tensor ``key`` in a file, where the plain model has the shape ``plain``."""
    if key == _CONVOLUTION:
        return (plain[0], image.num_channels, *image.patch_size)
    return (1, *plain) if key.endswith(("cls_token", "position_embeddings")) else plain


def file_blocks(key: str, blocks: Iterable[Tensor], image: ImageInputs) -> Iterator[Tensor]:
    """Rows of the tensor ``key`` of the plain model, some at a time, as files have them."""
    for block in blocks:
        if key != _CONVOLUTION:
            yield block
            continue
        yield block.view(-1, *image.patch_size, image.num_channels).permute(0, 3, 1, 2).contiguous()


def plain_entries(headers: Mapping[str, Sequence[Entry]]) -> dict[str, list[Entry]]:
    """The tensors in each file under the names and in the shapes of ``places``: their bytes are the same."""
    return {name: [_plain_entry(entry) for entry in entries] for name, entries in headers.items()}


def _plain_entry(entry: Entry) -> Entry:
    key = entry.box.key.removeprefix(WEIGHTS_PREFIX)
    if key.startswith("vit.layers."):
        key = key.replace("vit.layers.", "vit.encoder.layer.", 1)
        for newer, older in _NEWER.items():
            key = key.replace(f".{newer}.", f".{older}.")
    shape = entry.box.shape
    if key == _CONVOLUTION and len(shape) == 4:
        shape = (shape[0], shape[1] * shape[2] * shape[3])
    elif key.endswith(("cls_token", "position_embeddings")) and len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    box = replace(entry.box, key=f"{WEIGHTS_PREFIX}{key}", shape=shape, sizes=shape, offset=(0,) * len(shape))
    return replace(entry, box=box)


class ViTTensors(StoredTensors):
    """Tensors of such files, read as the plain model has them; ``image``: of the model."""

    image: ImageInputs

    def blocks(self, rows: TensorRows) -> Generator[Tensor]:
        """See ``StoredTensors``."""
        for block in super().blocks(rows):
            if rows.key != _CONVOLUTION:
                yield block
                continue
            of_channels = block.view(len(block), self.image.num_channels, *self.image.patch_size)
            yield of_channels.permute(0, 2, 3, 1).reshape(block.shape).to(memory_format=torch.contiguous_format)
