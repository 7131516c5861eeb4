"""The simulated engine for long traces: the same schedule, computed in spans of steps."""
