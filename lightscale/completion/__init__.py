"""Shell completion of `lightscale` commands."""
