"""What every fault uses: the command as a process, the faults of a run in turn, and the comparison at the end."""
