"""The commands of ``lightscale study``; without torch."""
