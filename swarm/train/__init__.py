"""Local steps on one peer: what it owns is trained, everything else is frozen. No network."""
