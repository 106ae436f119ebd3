"""Scaling-law studies: many runs as one, their curves, and the laws that are fitted to them."""
