"""A peer's start: checks, search, joining, founding and resuming."""
