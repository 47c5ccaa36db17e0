"""How processes of pario speak with each other without MPI: frames, the proof before them, one server, one client."""
