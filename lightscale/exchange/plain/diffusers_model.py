"""The diffusion transformer of a folder in the layout of diffusers: its configuration and weights, read from files."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lightscale.exchange.plain.model import ImageDenoiser, shape_from
from lightscale.exchange.plain.patches import pixels_of

WEIGHTS = "diffusion_pytorch_model"


class LightscaleTransformer(ImageDenoiser):
    """A diffusion transformer: noised images, timesteps and classes to predictions of the noise."""

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, torch_dtype: torch.dtype | None = None, **of_diffusers: Any
    ) -> "LightscaleTransformer":
        """The model in ``folder``, in evaluation mode; in the number format of its files, or in ``torch_dtype``.

        ``of_diffusers``: what diffusers also passes; not read.
        """
        path = Path(folder)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        model = cls(shape_from({key: value for key, value in config.items() if not key.startswith("_")}))
        weights: dict[str, Tensor] = {}
        for file in sorted(path.glob(f"{WEIGHTS}*.safetensors")):
            weights |= load_file(file)
        # Each in its own format: angles, decays and bounds are wider than the others.
        model.load_state_dict(weights, assign=True)
        if torch_dtype is not None:
            model.to(torch_dtype)
        return model.eval()

    def from_patches(self, patches: Tensor) -> Tensor:
        """(b, n, p) -> (b, channels, height, width)"""
        return pixels_of(patches, self.model.image)
