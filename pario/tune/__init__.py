"""How many reads and threads: knobs, what is measured, and the laws that turn them."""
