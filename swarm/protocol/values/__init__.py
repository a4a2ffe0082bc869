"""Values on which a run agrees: manifests, layouts, invitations, deals of text, weights."""
