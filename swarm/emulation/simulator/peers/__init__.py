"""One simulated peer: real machine and main loop, simulated surroundings, and the invariants."""
