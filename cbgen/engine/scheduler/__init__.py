"""Decides what each step runs. Pure Python: tested without torch."""
