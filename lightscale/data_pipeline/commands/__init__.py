"""The `lightscale data` commands: what they take, what they show."""
