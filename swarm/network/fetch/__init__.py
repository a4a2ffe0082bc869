"""The bulk path: blobs asked for, received, verified and served."""
