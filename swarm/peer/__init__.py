"""One peer of a run: local steps, offers and adoption, its state on disk, its status."""
