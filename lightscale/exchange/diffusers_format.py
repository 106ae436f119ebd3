"""A diffusion run as a folder in diffusers' layout: its schedule as DDIMScheduler, and the model with its own code.

DIR/model_index.json                      the classes of pipeline, transformer and scheduler; names of classes
    pipeline.py                           draws images; without diffusers too
    scheduler/scheduler_config.json       values of DDIMScheduler
    transformer/config.json               the shape
    transformer/diffusion_pytorch_model….safetensors, modeling_lightscale.py
"""

import json
from dataclasses import asdict
from importlib import resources
from typing import Any

import torch

from lightscale.errors import UserError
from lightscale.exchange.files import modelling_file
from lightscale.exchange.files.export_config import ConfigFacts
from lightscale.exchange.files.pipeline_folder import INDEX
from lightscale.exchange.files.safetensors_files import Written
from lightscale.exchange.files.scheduler_config import NAME as SCHEDULER
from lightscale.exchange.files.scheduler_config import scheduler_config
from lightscale.exchange.files.weights import kept_dtype
from lightscale.exchange.formats import ExportFormat
from lightscale.exchange.plain.model import Shape
from lightscale.exchange.trained import TrainedRun
from lightscale.tasks.diffusion import DiffusionTaskConfig

_FOLDER, _CLASS = "transformer/", "LightscaleTransformer"


class DiffusersFormat(ExportFormat):
    """Models that predict noise; tensors in fp32 are bitwise those of the checkpoint."""

    folder = _FOLDER
    stem = "diffusion_pytorch_model"

    def check(self, shape: Shape) -> None:
        """See ``ExportFormat``."""
        if shape.task != "diffusion":
            raise UserError(
                f"--format diffusers: it is for runs that draw images, and this one is of {shape.task}; use --format "
                "transformers"
            )

    def config(self, shape: Shape, facts: ConfigFacts) -> dict[str, Any]:
        """The fields of ``Shape``."""
        return {"_class_name": _CLASS, **asdict(shape)}

    def tensors(self, run: TrainedRun, dtype: torch.dtype) -> list[Written]:
        """See ``ExportFormat``."""
        return [
            Written(
                name=name,
                dtype=kept_dtype(name, dtype),
                shape=run.tensors.shape(rows),
                blocks=run.tensors.blocks(rows),
            )
            for name, rows in run.rows.items()
        ]

    def beside(self, run: TrainedRun) -> dict[str, str]:
        """See ``ExportFormat``."""
        task, image = run.chosen.config.task, run.shape.image
        assert isinstance(task, DiffusionTaskConfig) and image is not None, "checked"
        scheduler = scheduler_config(
            task.schedule, task.timesteps, task.prediction, image.image_mean, image.image_std, latents=image.latents
        )
        index = {
            "_class_name": ["pipeline", "LightscalePipeline"],
            "transformer": [modelling_file.NAME.removesuffix(".py"), _CLASS],
            "scheduler": ["diffusers", "DDIMScheduler"],
            "id2label": {str(number): name for number, name in enumerate(run.classes)},
            "label_dropout": task.label_dropout,
        }
        pipeline = resources.files("lightscale.exchange.plain") / "diffusers_pipeline.py"
        return {
            INDEX: _json(index),
            f"scheduler/{SCHEDULER}": _json(scheduler),
            f"{_FOLDER}{modelling_file.NAME}": modelling_file.modelling_file(modelling_file.DIFFUSERS),
            "pipeline.py": pipeline.read_text(encoding="utf-8"),
        }

    def usage(self, shape: Shape) -> str:
        """See ``ExportFormat``."""
        assert shape.image is not None, "a model of images"
        kind = "fp32" if shape.image.latents else "uint8"
        return f"""```python
import sys

sys.path.insert(0, PATH)
from pipeline import LightscalePipeline

images = LightscalePipeline.load(PATH).draw([0], seed=0)  # (1, h, w, c) {kind}
```"""


def _json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"
