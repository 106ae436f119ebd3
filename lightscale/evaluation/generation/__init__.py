"""`lightscale generate`: its request, prompts, and texts."""
