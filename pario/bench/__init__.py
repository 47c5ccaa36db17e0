"""Measures pario and its rivals: one dataset, the stores, the study of every way to read."""
