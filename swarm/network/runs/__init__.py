"""Runs in the network: how they are founded, announced, found, joined and observed."""
