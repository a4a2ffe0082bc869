"""A peer's account of itself: log, events, records."""
