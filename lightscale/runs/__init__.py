"""The directory of a run: its configuration, its records, and the commands that read them."""
