"""An engine whose device holds only the layers being computed; all else is in host memory."""
