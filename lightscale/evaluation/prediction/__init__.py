"""`lightscale predict`: what is asked for, documents, and the answers."""
