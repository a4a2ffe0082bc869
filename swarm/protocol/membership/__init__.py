"""Who takes part, who votes, and who trains which expert."""
