"""The LMDB file format: bytes in, positions out. No file handle, no MPI."""
