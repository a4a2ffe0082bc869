"""What all programs have in common: flags, their values, errors, logging."""
