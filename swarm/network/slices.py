"""How much of a large fetch is done in one go, so that the event loop has time for others.

A proposal of a 7B is some 4,000 pieces, and with 256 peers each has as many sources.
"""

JOINED_AT_ONCE = 8
"""Blobs that are queued in one go, some 20 ms for units of a 7B that 256 peers have."""
ASSIGNED_AT_ONCE = 128
"""Pieces handed out in one go, some 30 ms with 256 peers."""
YIELD_EVERY = 32
"""Small blobs that have all arrived are read without a pause; others get a turn after so many."""
