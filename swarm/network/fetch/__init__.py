"""Transfer of blobs: asked for, received, verified and served."""
