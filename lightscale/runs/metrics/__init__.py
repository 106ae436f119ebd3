"""The metrics of a training run, and their sinks."""
