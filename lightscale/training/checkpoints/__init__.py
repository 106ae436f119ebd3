"""Checkpoints: when they are saved, how they are written, verified and read back."""
