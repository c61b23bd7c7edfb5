"""The own kernels of the CPU path: packed weights, fused decoder layers, and their library."""
