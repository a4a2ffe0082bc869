"""Codes a unit's change in few bytes, from which all peers compute the same new value."""
