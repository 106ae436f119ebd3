"""The command `lightscale config`, and its picture."""
