"""Attention over pages: one file a backend, chosen by name."""
