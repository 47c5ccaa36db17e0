"""Record bytes to arrays: one contract, small leaves."""
