"""Small defects, planted one at a time: which tests notice them? The parts of `python -m benchmarks.mutants`."""
