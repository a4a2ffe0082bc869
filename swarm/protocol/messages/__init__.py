"""What peers say to agree on a manifest: messages, their bytes, signatures and limits."""
