"""An engine whose device holds only what it is computing; everything else is host memory."""
