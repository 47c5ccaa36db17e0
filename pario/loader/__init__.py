"""The public Loader: an epoch per `for` loop, its state, its end."""
