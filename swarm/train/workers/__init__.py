"""Worker processes of one peer: starting, commanding, watching and restoring them."""
