"""Local steps of one peer, which trains its owned tensors and freezes all others. No network."""
