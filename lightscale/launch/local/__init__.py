"""A queue of jobs on one machine: runs wait for its GPUs, without a cluster and without a service."""
