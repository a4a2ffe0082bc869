"""Rules removed one at a time, each of which the simulator must notice."""
