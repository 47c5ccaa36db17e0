"""Packed databases are made and undone here: sources, the order of the work, the partial file, the folder and the tar.

`pario.codec` says how values are packed; the commands `pack` and `unpack` call `pack.py` and `unpack.py`.
"""
