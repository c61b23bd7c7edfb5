"""The command line: commands, their display, exit codes."""
