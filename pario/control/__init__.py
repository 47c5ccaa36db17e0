"""Decided while jobs run: what each of several jobs may ask of the store that they share."""
