"""Images drawn by diffusion transformers: ``lightscale draw``."""
