"""Memory that the ranks of a node share: tests in time whether there is enough, and how all of them get it.

It is a sealed memfd of the node's first rank, which nobody can shrink under a reader. It has no name that a kill could
leave behind, is not limited by /dev/shm, and goes back when the last process has dropped its last view. The others get
its descriptor through a socket, in containers with process numbers of their own, too; if their networks differ they
open it by the first rank's process number.

The system grants memory that is not there, and kills a process that touches a missing page: so `refusal` compares the
need with the free memory, and the first rank has every page set aside immediately, which the system may refuse.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import accumulate
from typing import Any

import numpy as np

from pario import machine
from pario.comm.base import AnyWorld, together
from pario.comm.messages import Messages
from pario.errors import ParioError
from pario.machine import is_sealed, sealed_memory

#: Alignment of shared memory in bytes: enough for O_DIRECT, and the page size of most machines.
PAGE = 4096

#: Messages of others that a socket may find before the one from the first rank.
_MOST_STRANGERS = 64

_HINT = "Ask for more memory per node (Slurm: --mem), or use a smaller ring (Options.slots, slot_bytes)"


def refusal(nbytes: int) -> ParioError | None:
    """The reason why this node cannot take `nbytes` more, or None."""
    total, left = machine.memory(swap=True)
    if nbytes <= left or not total:  # there is enough, or nothing is known
        return None
    what = f"{nbytes:,} bytes wanted for data in flight, {left:,} bytes available"
    return ParioError(f"this node's memory is too small, or the job's limit: {what}", hint=_HINT)


def private_bytes(nbytes: int) -> np.ndarray:
    """u8[nbytes], zeroed and page-aligned, private to this process. Raises ParioError if there is too little."""
    refused = refusal(nbytes)
    if refused is not None:
        raise refused
    try:
        raw = np.zeros(nbytes + PAGE, dtype=np.uint8)
    except (MemoryError, ValueError) as e:  # the address space is limited
        raise ParioError(f"no memory for {nbytes:,} bytes of data in flight", hint=_HINT) from e
    start = -raw.ctypes.data % PAGE
    return raw[start : start + nbytes]


def shared_parts(world: AnyWorld, sizes: Sequence[int], doing: str) -> list[np.ndarray]:
    """Zeroed u8 arrays of these sizes, page-aligned, that the ranks of a node share. Collective over `world`; where
    memory is short, all ranks raise. doing : what for, in the error of the other ranks"""
    starts = [0, *accumulate(-(-size // PAGE) * PAGE for size in sizes)]
    with together(world, doing):
        memory = world.shared_bytes(starts[-1])
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def node_memory(node: Messages, rank: int, nbytes: int) -> np.ndarray:
    """u8[nbytes], page-aligned, zeroed, the same on all ranks of the node. Collective over `node`; raises ParioError on
    all its ranks.

    rank : this one's among all ranks, for errors
    """
    if node.size == 1:
        return private_bytes(nbytes)
    whole = -(-max(nbytes, 1) // PAGE) * PAGE
    memory, fd, name = np.empty(0, np.uint8), -1, b""
    refused: ParioError | None = None
    with ExitStack() as stack:
        try:
            line = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            line.setblocking(False)
            line.bind("")  # the system finds a name, which goes with the socket
            name = line.getsockname()
            refused = refusal(whole) if node.rank == 0 else None
            if node.rank == 0 and refused is None:
                fd = sealed_memory("pario-ring", whole, whole=True)
                stack.callback(os.close, fd)
        except OSError as e:
            refused = _no_memory(nbytes, e)
        everyones = node.allgather((refused, name, os.getpid(), fd))
        for refused, *_ in everyones:
            if refused is not None:
                raise refused.at(rank=rank)
        if node.rank == 0:
            for _, name, *_ in everyones[1:]:
                with suppress(OSError):  # its network is another one: it will open the memory by number
                    socket.send_fds(line, [b"memory"], [fd], 0, name)
        node.barrier()  # what was sent is there: nobody waits for it
        try:
            if node.rank:
                fd = _received(line, *everyones[0][1:])
                stack.callback(os.close, fd)
            if not is_sealed(fd, whole):
                raise OSError("the first rank's memory was not handed over")
            memory = np.frombuffer(mmap.mmap(fd, whole), np.uint8, nbytes)
        except (OSError, ValueError) as e:  # perhaps on this rank only
            refused = _no_memory(nbytes, e)
        failed = node.allreduce_min(node.size if refused is None else node.rank)
        if failed < node.size:
            raise node.bcast(refused, root=failed).at(rank=rank)
    return memory


def _received(line: socket.socket, sender: bytes, pid: int, fd: int) -> int:
    """What the first rank has sent; without waiting."""
    for _ in range(_MOST_STRANGERS):
        try:
            _, fds, _, whose = socket.recv_fds(line, 16, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            break
        if whose == sender and fds:
            return fds[0]
        for one in fds:  # from somebody else
            os.close(one)
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _no_memory(nbytes: int, error: Exception) -> ParioError:
    return ParioError(f"there is no memory for {nbytes:,} bytes that the node shares: {error}", hint=_HINT)


def park(what: Any) -> None:
    """Keep it until the process ends: communicators, or memory that an MPI call may still use."""
    _parked.append(what)


_parked: list[Any] = []
