"""The manager, and functions on a loaded model in place of those of transformers."""
