"""Sampling: parameters (no torch), counter-based noise, the vectorized sampler."""
