"""``lightscale chaos``: a run under faults, compared with the same run left in peace."""
