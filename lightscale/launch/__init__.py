"""Start of runs: one machine, torchrun, clusters."""
