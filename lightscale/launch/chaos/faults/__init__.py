"""The faults: each defines its kind, its injection, its required detection, and its repair."""
