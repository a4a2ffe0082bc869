"""The simulated world of a schedule and its faults: fault classes, liars, strangers."""
