"""The CUDA path of lightscale on a machine without a GPU."""
