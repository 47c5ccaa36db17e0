"""What is decided with numbers alone: order, shares, reads. Pure functions."""
