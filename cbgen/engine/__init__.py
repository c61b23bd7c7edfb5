"""cbgen's continuous-batching engine. It knows token ids and nothing of files or rows."""
