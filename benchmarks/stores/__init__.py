"""Stores that are slow and count: a throttled block device and a FUSE mount with latency."""
