"""The lesson that `python -m pario demo` runs; examples/train_digits.py in the repository is the same file."""
