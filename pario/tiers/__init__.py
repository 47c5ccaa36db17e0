"""Where copies of the dataset lie, nearer than the store."""
