"""What an LMDB file is: bytes in, positions out. No file handle, no MPI."""
