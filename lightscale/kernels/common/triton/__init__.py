"""What the Triton kernels of all operators share."""

from lightscale.kernels.common.triton.cache import provide_cache

provide_cache()
