"""MPI, shared memory and waiting; the only folder that imports mpi4py."""
