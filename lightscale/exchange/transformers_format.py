"""What transformers loads: LLaMA as its own classes, all others with the one modelling file that an export brings."""

import itertools
from typing import Any

import torch

from lightscale.errors import UserError
from lightscale.exchange.files import export_config, image_processor, modelling_file, own_vit
from lightscale.exchange.files.export_config import ConfigFacts
from lightscale.exchange.files.own_classes import whole_parts, whole_shapes
from lightscale.exchange.files.safetensors_files import Written
from lightscale.exchange.files.weights import TensorRows, kept_dtype
from lightscale.exchange.formats import ExportFormat
from lightscale.exchange.plain.model import Shape
from lightscale.exchange.trained import TrainedRun

_USES = {
    "causal": """inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0], skip_special_tokens=True))""",
    "masked": """inputs = tokenizer(f"The {tokenizer.mask_token} sat on the mat.", return_tensors="pt")
best = model(**inputs).logits.argmax(-1)
print(tokenizer.decode(best[inputs["input_ids"] == tokenizer.mask_token_id]))""",
    "classify": """inputs = tokenizer("Some text", return_tensors="pt")
print(model.config.id2label[model(**inputs).logits.argmax(-1).item()])""",
    "classify-image": """inputs = processor(Image.open("some.png"), return_tensors="pt")
print(model.config.id2label[model(**inputs).logits.argmax(-1).item()])""",
}
"""How a model of each task is used, in Python."""


class TransformersFormat(ExportFormat):
    """Every model has this form; tensors in fp32 are bitwise those of the checkpoint."""

    def check(self, shape: Shape) -> None:
        """All can be written but models that predict noise, which transformers has no classes of."""
        if shape.task == "diffusion":
            raise UserError("--format transformers: the run draws images; use --format diffusers")

    def config(self, shape: Shape, facts: ConfigFacts) -> dict[str, Any]:
        """See ``ExportFormat``."""
        return export_config.config_of(shape, facts)

    def tensors(self, run: TrainedRun, dtype: torch.dtype) -> list[Written]:
        """See ``ExportFormat``."""
        places = export_config.written_places(run.shape)
        sizes = {name: run.tensors.shape(rows) for name, rows in run.rows.items()}
        shapes = whole_shapes(places, sizes)
        if own_vit.computes(run.shape):
            return _vit_tensors(run, dtype, places, sizes)
        return [
            Written(
                name=key,
                dtype=kept_dtype(parts[0].name, dtype),
                shape=shapes[key],
                blocks=itertools.chain.from_iterable(
                    run.tensors.blocks(run.rows[part.name].part(part.first, len(part.rows))) for part in parts
                ),
            )
            for key, parts in whole_parts(places, sizes).items()
        ]

    def beside(self, run: TrainedRun) -> dict[str, str]:
        """Code, but none for transformers' own classes; of images also their processor's configuration."""
        shape = run.shape
        found = {} if shape.image is None else {image_processor.NAME: image_processor.image_processor(shape.image)}
        if export_config.has_own_class(shape):
            return found
        return {**found, modelling_file.NAME: modelling_file.modelling_file()}

    def usage(self, shape: Shape) -> str:
        """See ``ExportFormat``."""
        # transformers asks for it for the tokenizer too, as it reads the model's configuration for it.
        remote = "" if export_config.has_own_class(shape) else ", trust_remote_code=True"
        auto = export_config.auto_class(shape)
        reader, name = ("AutoTokenizer", "tokenizer") if shape.image is None else ("AutoImageProcessor", "processor")
        pillow = "" if shape.image is None else "from PIL import Image\n"
        return f"""```python
{pillow}from transformers import {auto}, {reader}

{name} = {reader}.from_pretrained(PATH{remote})
model = {auto}.from_pretrained(PATH{remote})
{_USES[shape.task]}
```

`lightscale.load(PATH)` loads it without transformers."""


def _vit_tensors(
    run: TrainedRun, dtype: torch.dtype, places: dict[str, TensorRows], sizes: dict[str, tuple[int, ...]]
) -> list[Written]:
    """Those of a ViT, each whole."""
    image = run.shape.image
    assert image is not None, "computes"
    return [
        Written(
            name=place.key,
            dtype=dtype,
            shape=own_vit.file_shape(place.key, sizes[name], image),
            blocks=own_vit.file_blocks(place.key, run.tensors.blocks(run.rows[name]), image),
        )
        for name, place in places.items()
    ]
