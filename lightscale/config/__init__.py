"""A run's configuration: fields, files and overrides, and the resulting layout."""
