"""Memory that the ranks of a node share: tests in time whether there is enough, and the windows themselves.

A window is a sparse file in /dev/shm. MPI grants a window that is too large, and a process that touches a missing page
is killed: by SIGBUS if /dev/shm is full, by SIGKILL if the job's memory limit is reached. So `refusal` compares the
need with the free memory, and `reserve` takes every page immediately, in a way that lets the kernel return an error.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from pario import machine
from pario.comm.base import AnyWorld
from pario.comm.messages import Messages
from pario.errors import ParioError

__all__ = ["PAGE", "Windows", "give_back", "park", "private_bytes", "refusal", "reserve", "shared_parts"]

#: Alignment of shared memory in bytes: enough for O_DIRECT, and the page size of most machines.
PAGE = 4096

_SHM_HINT = "Enlarge /dev/shm (in a container: --shm-size), or use a smaller ring (Options.slots, slot_bytes)"
_HINT = "Ask for more memory per node (Slurm: --mem), or use a smaller ring (Options.slots, slot_bytes)"


def refusal(nbytes: int, *, shared: bool) -> ParioError | None:
    """The reason why this node cannot take `nbytes` more, or None.

    shared : the memory is in /dev/shm
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
                hint=_HINT,
            )
    return None


def reserve(memory: np.ndarray) -> ParioError | None:
    """Zero `memory` (u8, part of a shared window), so that its pages exist from now on. Returns the reason if they
    cannot."""
    # read() into missing memory fails with EFAULT, or returns early, where a store would end the process.
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


def private_bytes(nbytes: int) -> np.ndarray:
    """u8[nbytes], zeroed and page-aligned, private to this process. Raises ParioError if there is too little."""
    refused = refusal(nbytes, shared=False)
    if refused is not None:
        raise refused
    try:
        raw = np.zeros(nbytes + PAGE, dtype=np.uint8)
    except (MemoryError, ValueError) as e:  # the address space is limited
        raise ParioError(f"no memory for {nbytes:,} bytes of data in flight", hint=_HINT) from e
    start = -raw.ctypes.data % PAGE
    return raw[start : start + nbytes]


def give_back(memory: np.ndarray) -> None:
    """Let the system have the pages of `memory`, u8 of `private_bytes`, page-aligned; they are zero when next used."""
    size = memory.nbytes // PAGE * PAGE
    if _madvise is not None and size:
        _madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(size), ctypes.c_int(_MADV_DONTNEED))


_MADV_DONTNEED = 4  # Linux, of private memory
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def shared_parts(world: AnyWorld, sizes: Sequence[int], doing: str) -> list[np.ndarray]:
    """Zeroed u8 arrays of these sizes, page-aligned, that the ranks of a node share. Collective over `world`; where
    memory is short, all ranks raise. doing : what for, in the error of the other ranks"""
    starts = [0, *accumulate(-(-size // PAGE) * PAGE for size in sizes)]
    memory: np.ndarray | None = None
    error: BaseException | None = None
    try:
        memory = world.shared_bytes(starts[-1])
    except ParioError as failure:
        error = failure
    world.agree(error, doing)
    assert memory is not None
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class Windows:
    """The MPI shared-memory windows of one node. All methods except `park` are collective over `node`."""

    def __init__(self, node: Messages, rank: int) -> None:
        """rank : this one's among all ranks, for errors"""
        self._node = node
        self._rank = rank
        self._made: list[tuple[Any, weakref.ref[Any]]] = []

    def allocate(self, nbytes: int) -> np.ndarray:
        """u8[nbytes], page-aligned, zeroed, shared by the node. Raises ParioError on all ranks of the node."""
        node = self._node
        if node.size == 1:
            return private_bytes(nbytes)
        MPI = node.mpi
        is_first = node.rank == 0
        self._agree(refusal(nbytes + PAGE, shared=True) if is_first else None)
        refused: ParioError | None = None
        memory = np.empty(0, dtype=np.uint8)
        try:
            window = MPI.Win.Allocate_shared(nbytes + PAGE if is_first else 0, 1, comm=node.comm)
        except MPI.Exception as e:  # perhaps on this rank only
            why = " ".join(e.Get_error_string().split())
            refused = ParioError(
                f"the MPI library found no memory for {nbytes:,} bytes that the node shares: {why}", hint=_HINT
            )
        else:
            base, _ = window.Shared_query(0)
            # Mappings start at a page on every rank, so the distance to the next page is the same everywhere.
            start = base.address + (-base.address) % PAGE
            owner = (ctypes.c_uint8 * nbytes).from_address(start)
            self._made.append((window, weakref.ref(owner)))
            if nbytes:
                memory = np.frombuffer(owner, dtype=np.uint8)
            # The kernel zeroes about 2 GB/s on one core, so each rank takes a part.
            first, end = (nbytes * k // node.size // PAGE * PAGE for k in (node.rank, node.rank + 1))
            refused = reserve(memory[first:] if node.rank + 1 == node.size else memory[first:end])
        self._agree(refused)
        return memory

    def _agree(self, refused: ParioError | None) -> None:
        """All ranks of the node continue, or all raise the first error."""
        node = self._node
        first = node.allreduce_min(node.size if refused is None else node.rank)
        if first < node.size:
            raise node.bcast(refused, root=first).at(rank=self._rank)

    def free(self) -> None:
        """Unmap each window of which no rank of the node has a view any more."""
        for window, view in self._made:
            if self._node.allreduce_max(view() is not None):
                park(window)  # a dangling array would crash the process
            else:
                window.Free()
        self._made = []

    def park(self) -> None:
        """Keep all windows until the process ends. Local."""
        park(self._made)
        self._made = []


def park(what: Any) -> None:
    """Keep it until the process ends: a window with views, or memory that an MPI call may still use."""
    _parked.append(what)


_parked: list[Any] = []
