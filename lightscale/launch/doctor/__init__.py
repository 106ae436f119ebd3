"""`lightscale doctor`: checks of this machine, or of all ranks of a job together, before training."""
