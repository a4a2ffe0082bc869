"""The chain of manifests: why one is believed, what is kept of it, and how gaps close."""
