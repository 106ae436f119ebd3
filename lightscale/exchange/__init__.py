"""Models out of lightscale and into it: as a library, as directories that transformers loads."""
