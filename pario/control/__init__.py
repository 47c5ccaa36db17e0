"""Live knobs and what turns them: control laws and measurements, without clocks, files or MPI."""
