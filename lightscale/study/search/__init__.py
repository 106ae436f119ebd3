"""Searches over hyperparameters: what is tried, and what goes on after a rung."""
