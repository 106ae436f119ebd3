"""A queue of jobs on one machine: runs wait for its GPUs, without cluster or service."""
