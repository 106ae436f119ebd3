"""`lightscale chat`: conversations with a model."""
