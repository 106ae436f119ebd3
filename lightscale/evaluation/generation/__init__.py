"""`lightscale generate`: what is asked for, prompts, and the text."""
