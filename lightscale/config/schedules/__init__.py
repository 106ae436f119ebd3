"""Learning rate schedules: pure functions of the step and the length of the run."""
