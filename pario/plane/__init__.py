"""Decided while jobs run: how deep to prefetch, and what each of several jobs may ask of the store that they share."""
