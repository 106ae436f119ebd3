"""The launcher of one host: it starts ranks, watches them, and starts them again."""
