"""Measures a dataset as pario reads it."""
