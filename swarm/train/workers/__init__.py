"""Worker processes of one peer: starts, commands, watches and restores them."""
