"""The chain of manifests: why peers believe it, which links they keep, and how gaps close."""
