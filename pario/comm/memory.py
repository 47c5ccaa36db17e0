"""Is there memory for what the ranks of a node want to share? Asked before it is too late.

A window is a sparse file in /dev/shm: a too large one is granted, and whoever touches a page that cannot be had is
killed: by SIGBUS when /dev/shm is full, by SIGKILL when the job's memory limit is reached. So two things are done:
`refusal` compares what is wanted with what is free, and `reserve` takes every page at once, in a way in which the
kernel answers with an error.
"""

from __future__ import annotations

import numpy as np

from pario import machine
from pario.errors import ParioError

__all__ = ["HINT", "refusal", "reserve"]

_SHM_HINT = "Enlarge /dev/shm (in a container: --shm-size), or use a smaller ring (Options.slots, slot_bytes)"
HINT = "Ask for more memory per node (Slurm: --mem), or use a smaller ring (Options.slots, slot_bytes)"


def refusal(nbytes: int, *, shared: bool) -> ParioError | None:
    """Why this node cannot take `nbytes` more, or None.

    shared : in /dev/shm
    """
    room = machine.shared_memory() if shared else None
    if room is not None and nbytes > room[1]:
        return ParioError(
            f"this node's shared memory is too small: {nbytes:,} bytes wanted, {room[1]:,} bytes free in /dev/shm",
            hint=_SHM_HINT,
        )
    least = min((left for _, left in machine.memory_limits()), default=None)
    for what, left in (("memory", machine.free_memory()), ("memory limit", least)):
        if left is not None and nbytes > left:
            return ParioError(
                f"this node's {what} is too small: {nbytes:,} bytes wanted for data in flight, {left:,} bytes free",
                hint=HINT,
            )
    return None


def reserve(memory: np.ndarray) -> ParioError | None:
    """Zero `memory` (u8, part of a shared window), so that its pages are there from now on; or why they cannot be."""
    # read() into memory that cannot be had fails with EFAULT, or early, where a store would end the process.
    # (madvise with MADV_POPULATE_WRITE would do the same, from Linux 5.14 on.)
    done = 0
    try:
        with open("/dev/zero", "rb", buffering=0) as zeros:
            while done < memory.nbytes and (n := zeros.readinto(memory[done:])):
                done += n
    except OSError:
        pass
    if done == memory.nbytes:
        return None
    return ParioError(
        f"this node's shared memory is too small: of {memory.nbytes:,} bytes only {done:,} could be had",
        hint=_SHM_HINT,
    )
