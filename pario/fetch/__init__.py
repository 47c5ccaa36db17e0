"""Where bytes come from: one contract, small leaves."""
