"""The view of a person on a run: a projection of records, and how it is drawn."""
