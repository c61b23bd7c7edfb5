"""The engine's thread and what callers see of it."""
