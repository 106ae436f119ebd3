"""What a run will take before it is paid for: parameters, FLOPs, memory, speed, failures."""
