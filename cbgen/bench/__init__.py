"""Measuring the engine: workloads, times, and what the machine could do at best."""
