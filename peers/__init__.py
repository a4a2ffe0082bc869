"""The programs that people start: parsing, wiring, the visible main loop, exit codes."""
