"""lightscale trains long-context language models whose token mixing is linear in the sequence length."""

__version__ = "0.1.0"
