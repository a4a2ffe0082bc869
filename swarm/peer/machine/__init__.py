"""This machine: state directory, memory, cores, GPUs, workers, and the engine that fits it."""
