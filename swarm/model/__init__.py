"""The network: transformer, losses, initial weights, export, merge arithmetic and cost formulas."""
