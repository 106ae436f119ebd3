"""A run's configuration: its fields, the files and overrides it is read from, and the layout it gives."""
