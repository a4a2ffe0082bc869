"""Blobs on this machine: content under its digest, in append-only packs."""
