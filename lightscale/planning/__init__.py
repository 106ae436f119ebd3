"""Predictions for a run before it starts: parameters, FLOPs, memory, speed, failures."""
