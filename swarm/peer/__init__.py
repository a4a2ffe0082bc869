"""One peer of a run: its local steps, offers and adoptions, state on disk, and status."""
