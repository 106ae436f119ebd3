"""Draws images with the model in this folder, by DDIM with classifier-free guidance; needs PyTorch and safetensors.

    images = LightscalePipeline.load("FOLDER").draw([3, 7], steps=50, guidance=2.0, seed=0)   # (2, h, w, c) uint8

They are those that `lightscale draw --sampler ddim` draws with the same seed, guidance and steps: the noise is the same
function of the seed and of an image's number. With diffusers installed, DiffusionPipeline.from_pretrained("FOLDER",
trust_remote_code=True) is this class too. Written by `lightscale export`; licence: Apache-2.0.
"""

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    from diffusers import DiffusionPipeline
except ImportError:
    DiffusionPipeline = object

MODEL = "modeling_lightscale"
_GAMMA, _FIRST, _SECOND = 0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB


class LightscalePipeline(DiffusionPipeline):
    """A diffusion transformer and its schedule.

    Args:
        transformer: predicts ε, or v.
        scheduler: diffusers' DDIMScheduler, or its configuration.
        id2label: names of classes, by number.
        label_dropout: share of training images whose class was dropped; 0: without a class nothing was learned.
    """

    def __init__(
        self,
        transformer: Any,
        scheduler: Any,
        id2label: Mapping[str, str] | None = None,
        label_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if isinstance(scheduler, Mapping):
            self.transformer, self.scheduler = transformer, scheduler
        else:
            self.register_modules(transformer=transformer, scheduler=scheduler)
            self.register_to_config(id2label=id2label, label_dropout=label_dropout)
        self.names, self.label_dropout = dict(id2label or {}), label_dropout

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "cpu") -> "LightscalePipeline":
        """The pipeline in ``folder``, without diffusers."""
        path = Path(folder)
        spec = importlib.util.spec_from_file_location(MODEL, path / "transformer" / f"{MODEL}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        index = json.loads((path / "model_index.json").read_text(encoding="utf-8"))
        return cls(
            module.LightscaleTransformer.from_pretrained(path / "transformer").to(device),
            json.loads((path / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8")),
            id2label=index["id2label"],
            label_dropout=index["label_dropout"],
        )

    def draw(
        self,
        classes: Sequence[int | str],
        *,
        steps: int | None = None,
        guidance: float | None = None,
        seed: int = 0,
        noise: Tensor | None = None,
        batch_size: int = 64,
    ) -> Tensor:
        """Images (b, height, width, channels), uint8, or latents, fp32, of ``classes`` (b,), by numbers or names.

        Args:
            classes: of each image.
            steps: number of timesteps that are visited, evenly from the last one to the first; None: 50, or all.
            guidance: w, of without class + w (with class - without class); 1: with the class alone; None: 1, or 0 of a
                model that learned without classes.
            seed: of the noise that images begin as.
            noise: (b, channels, height, width), that noise; None: by ``seed``.
            batch_size: images per forward pass.

        Raises:
            ValueError: an unknown class, or steps or guidance that the model was not trained for.
        """
        labels = torch.tensor([self._number(name) for name in classes])
        image, config = self.transformer.shape.image, self._config()
        shares = signal_shares(config)
        steps = min(50, len(shares)) if steps is None else steps
        guidance = float(self.label_dropout != 1) if guidance is None else guidance
        limits = {
            "len(classes)": (len(labels), 1, math.inf),
            "steps": (steps, 1, len(shares)),
            "guidance": (guidance, -1e6, 1e6),
            "seed": (seed, 0, 2**64 - 1),
            "batch_size": (batch_size, 1, math.inf),
        }
        for name, (value, least, most) in limits.items():
            if not least <= value <= most:
                raise ValueError(f"{name} = {value}: use {least} to {most}")
        untrained = {0.0: "without a class", 1.0: "with one"}.get(self.label_dropout)
        if untrained is not None and guidance != 1 - self.label_dropout:
            raise ValueError(
                f"guidance = {guidance}: the model learned nothing {untrained}; use {1 - self.label_dropout}"
            )
        if noise is None:
            shape = (image.tokens, math.prod(image.patch_size) * image.num_channels)
            noise = self.transformer.from_patches(torch.stack([normal(shape, seed, n, 0) for n in range(len(labels))]))
        mean, std = (
            torch.tensor(values, dtype=torch.float64).expand(image.num_channels)[:, None, None]
            for values in (image.image_mean, image.image_std)
        )
        x = noise.double().cpu()
        last = len(shares) - 1
        visited = [round(n * last / (steps - 1)) for n in reversed(range(steps))] if steps > 1 else [last]
        for timestep, following in zip(visited, [*visited[1:], None], strict=True):
            share, after = shares[timestep], 1.0 if following is None else shares[following]
            predicted = self._guided(x, timestep, labels, guidance, batch_size)
            if config["prediction_type"] == "epsilon":
                clean = (x - math.sqrt(1 - share) * predicted) / math.sqrt(share)
            else:
                clean = math.sqrt(share) * x - math.sqrt(1 - share) * predicted
            if not image.latents:
                clean = clean.clamp(-mean / std, (1 - mean) / std)
            # The noise that leads to the pixels as they were cut off.
            left = (x - math.sqrt(share) * clean) / math.sqrt(1 - share)
            x = math.sqrt(after) * clean + math.sqrt(1 - after) * left
        x = (x * std + mean).permute(0, 2, 3, 1)
        return x.float().contiguous() if image.latents else (x.clamp(0, 1) * 255).round().to(torch.uint8).contiguous()

    def _guided(self, x: Tensor, timestep: int, labels: Tensor, guidance: float, batch_size: int) -> Tensor:
        if guidance == 1:
            return self._predicted(x, timestep, labels, batch_size)
        nothing = torch.full_like(labels, self.transformer.shape.num_labels)
        of_class, without = self._predicted(
            torch.cat([x, x]), timestep, torch.cat([labels, nothing]), batch_size
        ).chunk(2)
        return without + guidance * (of_class - without)

    @torch.no_grad()
    def _predicted(self, x: Tensor, timestep: int, labels: Tensor, batch_size: int) -> Tensor:
        device, found = next(self.transformer.parameters()).device, []
        for some, own in zip(x.split(batch_size), labels.split(batch_size), strict=True):
            timesteps = torch.full_like(own, timestep).to(device)
            found.append(self.transformer(some.float().to(device), timesteps, own.to(device)).double().cpu())
        return torch.cat(found)

    def _number(self, name: int | str) -> int:
        # A name is meant before a number.
        known = {str(number): number for number in range(self.transformer.shape.num_labels)}
        known |= {label: int(number) for number, label in self.names.items()} if isinstance(name, str) else {}
        if str(name) not in known:
            raise ValueError(f"class {name!r}: use one of {', '.join(list(known)[:20])}")
        return known[str(name)]

    def _config(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = getattr(self.scheduler, "config", self.scheduler)
        return found


def signal_shares(config: Mapping[str, Any]) -> list[float]:
    """ᾱ of each timestep, in fp64, of a configuration of DDIMScheduler. ValueError for another schedule."""
    count, wide = config["num_train_timesteps"], torch.float64
    if config["trained_betas"] is not None:
        betas = torch.tensor(config["trained_betas"], dtype=wide)
    elif config["beta_schedule"] == "linear":
        betas = torch.linspace(config["beta_start"], config["beta_end"], count, dtype=wide)
    elif config["beta_schedule"] == "squaredcos_cap_v2":
        ends = torch.cos((torch.arange(count + 1, dtype=wide) / count + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = (1 - ends[1:] / ends[:-1]).clamp(max=0.999)
    else:
        raise ValueError(f"beta_schedule = {config['beta_schedule']!r}: use linear, squaredcos_cap_v2 or trained_betas")
    return (1 - betas).cumprod(0).tolist()


def normal(shape: Sequence[int], *key: int) -> Tensor:
    """Standard normal numbers, fp64, of ``key``: by SplitMix64, and by Box and Muller."""
    count, state = math.prod(shape), torch.zeros(1, dtype=torch.int64)
    for part in key:
        state = mixed(state + wrapped(part) + wrapped(_GAMMA))
    bits = mixed(state + torch.arange(1, 2 * count + 1) * wrapped(_GAMMA))
    radius, angle = (shifted(bits, 11).double() * 2.0**-53).view(2, count)
    return (torch.sqrt(-2 * torch.log1p(-radius)) * torch.cos(2 * math.pi * angle)).view(*shape)


def mixed(bits: Tensor) -> Tensor:
    """The finalizer of SplitMix64, of 64 bits in int64."""
    bits = (bits ^ shifted(bits, 30)) * wrapped(_FIRST)
    bits = (bits ^ shifted(bits, 27)) * wrapped(_SECOND)
    return bits ^ shifted(bits, 31)


def shifted(bits: Tensor, count: int) -> Tensor:
    """Of 64 bits in int64, shifted to the right with zeros."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def wrapped(number: int) -> int:
    """The int64 with the bits of ``number``, from 0 to 2^64 - 1."""
    return number - (1 << 64) if number >> 63 else number
