"""Frozen workloads, measured side by side; JSON out, tables made from it. See measurements/benchmarks.md."""
