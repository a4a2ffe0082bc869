"""The shell of the round machine: messages, transfers, means, and the record on disk."""
