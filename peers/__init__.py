"""The command-line programs: they read options, start the work, and end with an exit code."""
