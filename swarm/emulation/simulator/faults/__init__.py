"""The world of a schedule and what happens to it: fault classes, liars, strangers."""
