"""Models: loading, the attention hook, and the probe that checks it."""
