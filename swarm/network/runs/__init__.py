"""Runs as the network sees them: founded, announced, searched for, joined and observed."""
