"""Stands in for NVIDIA's Transformer Engine; see ../../README.md."""

__version__ = "2.9.0"
