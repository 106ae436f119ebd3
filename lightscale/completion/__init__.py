"""Completion of `lightscale` commands in shells."""
