"""Linear layers whose products take their inputs in 8 bits."""
