"""Starting runs: one machine, torchrun, clusters."""
