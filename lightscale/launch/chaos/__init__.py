"""``lightscale chaos``: a run under kills, damage and bad disks, compared with the same run left in peace."""
