"""Instruments that characterise a job's I/O: reading over threads, overlap with computing, checkpoints."""
