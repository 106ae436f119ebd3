"""The training loop with its optimizer, checkpoints and metrics."""
