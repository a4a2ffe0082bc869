"""One simulated peer: real machine and main loop between simulated parts, and what must hold."""
