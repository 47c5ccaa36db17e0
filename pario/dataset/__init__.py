"""One LMDB, opened by all ranks of a communicator."""
