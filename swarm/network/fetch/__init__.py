"""Transfer of blobs: requests, receives, verifies and serves them."""
