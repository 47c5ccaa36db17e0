#!/usr/bin/env python3
"""`start_ranks.py -n N python ...`: N processes that find each other without MPI, as torchrun would start them.

As mpiexec does, it ends with the first status that is not 0, and soon after that ends the others. Where the tests show
MPICH several nodes (MPIR_CVAR_NUM_CLIQUES), the ranks are on as many.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

#: Seconds that the others have after a rank has failed.
AFTER_S = 10.0


def main(words: list[str]) -> int:
    if words == ["--version"]:
        return 0
    _, number, *command = words
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = int(os.environ.pop("MPIR_CVAR_NUM_CLIQUES", "1"))
    ranks = []
    for rank in range(int(number)):
        env = dict(RANK=str(rank), WORLD_SIZE=number, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        env["PARIO_NODE"] = str(rank % nodes)
        ranks.append(subprocess.Popen(command, env={**os.environ, **env}))
    until = float("inf")
    while any(rank.poll() is None for rank in ranks):
        if until == float("inf") and any(rank.poll() for rank in ranks):
            until = time.monotonic() + AFTER_S
        if time.monotonic() > until:
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)
    return next((abs(rank.returncode) for rank in ranks if rank.returncode), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
