"""Health of a run: checks of machines, heartbeats, bad steps, silent corruption, fault injection."""
