"""Engines for one peer with several processes, each with a device of its own."""
