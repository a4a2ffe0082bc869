"""Which units a round exchanges, and from whom their bytes come."""
