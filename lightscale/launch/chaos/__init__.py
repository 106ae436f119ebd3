"""``lightscale chaos``: a run under faults, compared with the same run undisturbed."""
