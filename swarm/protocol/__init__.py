"""What every peer must compute identically: pure functions and state machines, no I/O."""
