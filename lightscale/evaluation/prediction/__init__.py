"""`lightscale predict`: its request, documents, and answers."""
