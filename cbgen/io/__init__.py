"""Rows and files: bytes to records and prompts, answers to output lines; knows no engine."""
