"""Deadlines and the measured pace that adapts them. No clock."""
