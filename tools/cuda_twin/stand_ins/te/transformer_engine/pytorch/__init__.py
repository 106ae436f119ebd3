"""Stands in for NVIDIA's Transformer Engine; see ../../../README.md."""
