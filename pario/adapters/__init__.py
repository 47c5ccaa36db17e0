"""Thin bridges to frameworks. Each file imports its framework, and nothing else in pario imports these files."""
