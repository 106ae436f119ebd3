"""The commands that start, stop and show runs."""
