"""An engine whose device holds only the part that it computes; all else is in host memory."""
