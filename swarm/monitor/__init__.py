"""A person's view of a run: computes the swarm's state from records, and draws the state."""
