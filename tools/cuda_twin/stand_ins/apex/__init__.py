"""Stands in for NVIDIA apex; see ../README.md."""
