"""Local steps on one peer: it trains what it owns, everything else is frozen. No network."""
