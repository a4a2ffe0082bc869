"""A peer's private state on disk."""
