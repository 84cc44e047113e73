"""Fast loops over blocks of elements: `cpu` (numba) and `torch`."""
