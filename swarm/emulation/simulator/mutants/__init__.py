"""Code with one rule removed at a time. The simulator must notice each removal."""
