"""A peer's local steps, its offers, and the adoption of agreed values."""
