"""The command-line programs: parsing, wiring, the visible main loop, exit codes."""
