"""Measures a dataset as pario reads it, and a job on its store."""
