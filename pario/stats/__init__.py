"""Counters of what the ranks did, and their interpretation. No file, no MPI, no clock."""
