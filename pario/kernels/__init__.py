"""Numba kernels: arrays and integers in, `out` written, a status integer back."""
