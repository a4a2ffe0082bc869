"""A peer's reports about itself: log, events, records."""
