"""The commands of `python -m pario`: app.py says how they are called, the others do the work."""
