"""The parts that all programs share: flags, their values, errors, logging."""
