"""Values as symbols: a value *is* the record of how it was made."""
