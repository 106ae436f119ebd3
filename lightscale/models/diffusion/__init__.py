"""Diffusion transformers (DiT, arXiv 2212.09748) around any mixer."""
