"""Numba kernels: they take arrays and integers, write into `out`, and return a status integer."""
