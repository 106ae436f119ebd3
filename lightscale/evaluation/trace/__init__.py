"""Which documents made the loss of a step: `lightscale data trace`."""
