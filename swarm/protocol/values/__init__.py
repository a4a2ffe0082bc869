"""What a run agrees on: manifests, layouts, invitations, deals of text and weights."""
