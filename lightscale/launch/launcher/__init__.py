"""The launcher of one host: it starts, supervises and restarts ranks."""
