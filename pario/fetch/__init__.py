"""Sources of bytes: one contract, small implementations."""
