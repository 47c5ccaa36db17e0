"""Compression of values: one contract (base.py), one file per family of codecs, one table of their names."""
