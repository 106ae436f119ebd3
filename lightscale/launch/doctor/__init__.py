"""`lightscale doctor`: whether this machine, or the ranks of a job together, can train."""
