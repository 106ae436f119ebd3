"""Commands that start, stop and show runs."""
