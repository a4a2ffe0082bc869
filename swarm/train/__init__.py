"""Local steps of one peer, which trains its owned tensors and freezes the others; no network."""
