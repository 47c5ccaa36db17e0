"""DLIO, the benchmark behind MLPerf Storage, with pario as its reader, its data loader and its checkpoints.

See measurements/dlio.md. `reader`, `loader` and `checkpoint` are the plug-ins for a DLIO run of your own; the other
files compare them with DLIO's readers, in an environment that `python -m benchmarks.dlio` makes.
"""
