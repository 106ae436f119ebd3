"""CPU time of augmentation per image: 256 x 256 pixels to 224 x 224.

python tools/benchmarks/augment.py
"""

import time

import numpy as np

from lightscale.config.augmentation import AugmentationConfig
from lightscale.data_pipeline.augmentation.augment import Augmentation

IMAGES, REPEATS = 64, 4
CROPS = {"crop_scale": [0.08, 1.0], "horizontal_flip": 0.5}
# DeiT's, as in configs/recipe/imagenet.toml.
ALL = {**CROPS, "rand_augment_ops": 2, "random_erasing": 0.25, "mixup_alpha": 0.8, "cutmix_alpha": 1.0}


def seconds_per_image(keys: dict[str, object]) -> float:
    """Least of some repeats."""
    config = AugmentationConfig.model_validate(keys)
    made = Augmentation(config=config, size=(224, 224), mean=[0.5] * 3, std=[0.5] * 3)
    coarse = np.random.default_rng(0).integers(0, 256, (32, 32, 3))
    pixels = np.kron(coarse, np.ones((8, 8, 1))).astype(np.uint8)
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        images = made.images(dict.fromkeys(range(IMAGES), pixels))
        if config.mixes:
            for turn in range(IMAGES):
                made.mixed(images, turn)
        times.append(time.process_time() - started)
    return min(times) / IMAGES


def main() -> None:
    """The command."""
    for name, keys in {"crops and flips": CROPS, "all": ALL}.items():
        print(f"{name}: {seconds_per_image(keys) * 1e3:.2f} ms of CPU per image")


if __name__ == "__main__":
    main()
