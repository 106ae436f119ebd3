"""The `lightscale data` commands: their arguments and their output."""
