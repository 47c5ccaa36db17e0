"""Is there memory for what the ranks of a node want to share? Asked before it is too late.

A window is a sparse file in /dev/shm: a too large one is granted, and whoever touches a page that cannot be had is
killed: by SIGBUS when /dev/shm is full, by SIGKILL when the job's memory limit is reached. So two things are done:
`refusal` compares what is wanted with what is free, and `reserve` takes every page at once, in a way in which the
kernel answers with an error.
"""

from __future__ import annotations

import os
from contextlib import suppress

import numpy as np

from pario.errors import ParioError

__all__ = ["HINT", "refusal", "reserve"]

SHM = "/dev/shm"

#: where the kernel tells; tests put other files there
PROC, CGROUPS = "/proc", "/sys/fs/cgroup"

_SHM_HINT = "Enlarge /dev/shm (in a container: --shm-size), or use a smaller ring (Options.slots, slot_bytes)"
HINT = "Ask for more memory per node (Slurm: --mem), or use a smaller ring (Options.slots, slot_bytes)"


def refusal(nbytes: int, *, shared: bool) -> ParioError | None:
    """Why this node cannot take `nbytes` more, or None.

    shared : in /dev/shm
    """
    if shared:
        with suppress(OSError):
            room = os.statvfs(SHM)
            free = room.f_bavail * room.f_frsize
            if nbytes > free:
                return ParioError(
                    f"this node's shared memory is too small: {nbytes:,} bytes wanted, {free:,} bytes free in {SHM}",
                    hint=_SHM_HINT,
                )
    for what, left in (("memory", _machine_free()), ("memory limit", _limit_free())):
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


def _machine_free() -> int | None:
    """Bytes that programs can still have, by /proc/meminfo."""
    return _sum(f"{PROC}/meminfo", b"MemAvailable:", b"SwapFree:", unit=1024)


def _limit_free() -> int | None:
    """Bytes left of the narrowest memory limit of this process's control groups (a batch system's, a container's)."""
    found = []
    with suppress(OSError), open(f"{PROC}/self/cgroup", "rb") as file:
        for line in file.read().splitlines():
            _, controllers, path = line.split(b":", 2)
            if controllers == b"":  # version 2
                top, limit, usage, cached = CGROUPS, "memory.max", "memory.current", (b"inactive_file", b"active_file")
            elif b"memory" in controllers.split(b","):
                top, limit, usage = f"{CGROUPS}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
                cached = (b"total_inactive_file", b"total_active_file")
            else:
                continue
            here = os.fsdecode(path).strip("/")
            while True:
                folder = os.path.join(top, here)
                most, used = _number(f"{folder}/{limit}"), _number(f"{folder}/{usage}")
                if most is not None and used is not None:
                    # File pages in the cache count as used, and make room when memory is wanted.
                    found.append(most - used + (_sum(f"{folder}/memory.stat", *cached) or 0))
                if not here:
                    break
                here = os.path.dirname(here)
    return min(found, default=None)


def _number(place: str) -> int | None:
    try:
        with open(place, "rb") as file:
            return int(file.read())
    except (OSError, ValueError):  # "max": no limit
        return None


def _sum(place: str, *names: bytes, unit: int = 1) -> int | None:
    """Of the lines "name number ..." of a file; None if there is none."""
    try:
        with open(place, "rb") as file:
            lines = [line.split() for line in file]
    except OSError:
        return None
    values = [int(words[1]) for words in lines if words and words[0] in names]
    return sum(values) * unit if values else None
