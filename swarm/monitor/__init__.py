"""What a person sees: a projection of records, and how it is drawn."""
