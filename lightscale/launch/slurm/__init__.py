"""Runs as jobs of a SLURM cluster: the batch script, the nodes of a job, and the commands around both."""
