"""Exports an agreed model of a run as a folder that Transformers loads."""
