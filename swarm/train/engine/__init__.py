"""One interface for local steps, and the engine that keeps the whole model on one device."""
