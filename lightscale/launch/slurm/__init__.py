"""Runs as jobs of a SLURM cluster: batch script, nodes of a job, and SLURM's commands."""
