"""What the ranks did, in numbers, and what these numbers say. No file, no MPI, no clock."""
