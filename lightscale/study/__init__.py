"""Scaling-law studies: sets of runs, their curves, and laws fitted to them."""
