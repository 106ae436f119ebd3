"""Shared parts of all faults: the command as a process, the sequence of faults, and the final comparison."""
