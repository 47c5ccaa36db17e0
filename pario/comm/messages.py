"""The collectives that pario uses over one communicator, and how it waits for them.

Three rules hold for every MPI call of pario:

* It uses a private duplicate of the user's communicator, in the thread that called pario. Background threads never call
  MPI, so any thread level is enough.
* It waits without polling. MPI libraries poll in blocking calls, and with more ranks than cores that takes the
  processor from the rank that all wait for. So pario starts a nonblocking collective and tests it between sleeps that
  grow to 10 ms. Calls without a nonblocking form (Dup, Split) follow right after such a collective, when all are there.
* Counts stay below 2^30 per call, because older MPI libraries count in 32-bit integers.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pario.errors import ClosedError

#: Limit of one MPI call, in bytes. (A library may have a smaller one.)
CHUNK = 1 << 30

#: Bytes of the first message of an object's broadcast: below the eager limit of the MPI libraries we know.
HEAD = 1024

#: i64 words of what each rank says at once in `allgather` and `allgather_int`: a number, and an object that is small.
WORDS = 16
SMALL = 8 * (WORDS - 1)  # bytes of that object

#: Waiting: the first pauses only yield; later ones are this fraction of the time waited so far, up to this many
#: seconds. So a wait lasts only slightly too long, and a long one takes almost no processor time, even if many ranks
#: share a core.
PAUSE_PART = 1 / 16
LONGEST_PAUSE_S = 1e-2


def wait_politely(request: Any, on_wait: Callable[[], None] | None = None) -> None:
    """Wait for a nonblocking MPI call without polling; `on_wait` may raise to give up."""
    pause = 0.0
    tries = 0
    begin = time.monotonic()
    sleep = getattr(request, "sleep", time.sleep)  # what has a socket wakes up earlier
    while not request.Test():
        tries += 1
        if tries > 20:  # in most calls the others are there already, so yield first
            pause = min(max(2e-5, (time.monotonic() - begin) * PAUSE_PART), LONGEST_PAUSE_S)
            if on_wait is not None:
                on_wait()
        sleep(pause)


class Messages:
    """Collectives over one communicator; each waits by calling `wait`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        A private one
    wait : wait(request) returns when a nonblocking call has ended, and may raise
    """

    def __init__(self, comm: Any, wait: Callable[[Any], None]) -> None:
        self.mpi: Any = library_of(comm)
        self._comm = comm
        self._wait = wait
        self.size: int = comm.Get_size()
        self.rank: int = comm.Get_rank()

    @property
    def comm(self) -> Any:
        """The communicator. Raises ClosedError if it was freed."""
        if self._comm is None:
            raise ClosedError(f"this {type(self).__name__} was freed", rank=self.rank)
        return self._comm

    @property
    def is_freed(self) -> bool:
        return self._comm is None

    @property
    def _most(self) -> int:
        """Bytes of one call."""
        return min(CHUNK, getattr(self.mpi, "MOST_BYTES", CHUNK))

    def wait(self, request: Any) -> None:
        """Wait for a nonblocking call on `comm`. Raises PeerError, DeadRankError."""
        self._wait(request)

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        self.wait(self.comm.Ibarrier())

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Any picklable object from rank `root`. Collective."""
        is_root = self.rank == root
        # The first message holds the length and as much as fits: for most objects everything, so one wait instead of
        # two.
        head = np.zeros(HEAD, dtype=np.uint8)
        payload = np.empty(0, dtype=np.uint8)
        if is_root:
            payload = _pickled(obj)
            head[:8] = np.array([payload.size], dtype=np.int64).view(np.uint8)
            head[8 : 8 + payload.size] = payload[: HEAD - 8]
        self.wait(self.comm.Ibcast([head, self.mpi.BYTE], root=root))
        length = int(head[:8].view(np.int64)[0])
        first = head[8 : 8 + length]
        if not is_root:
            payload = np.empty(length, dtype=np.uint8)
            payload[: first.size] = first
        self.bcast_bytes(payload[first.size :], root)
        return obj if is_root else pickle.loads(payload)

    def bcast_bytes(self, data: np.ndarray, root: int = 0) -> None:
        """u8[n] of any length from rank `root` into the others' `data`, of the same length. Collective."""
        most = self._most
        for start in range(0, data.size, most):
            self.wait(self.comm.Ibcast([data[start : start + most], self.mpi.BYTE], root=root))

    def say(self, value: int, small: np.ndarray | None = None) -> np.ndarray:
        """i64[size, WORDS]: of each rank its `value`, and the bytes of its `small`, u8[n] with n <= SMALL.
        Collective."""
        mine, everyones = np.zeros(WORDS, np.int64), np.empty((self.size, WORDS), np.int64)
        mine[0] = value
        if small is not None:
            mine.view(np.uint8)[8 : 8 + small.size] = small
        self.wait(self.comm.Iallgather(mine, everyones))
        return everyones

    def allgather(self, obj: Any) -> list[Any]:
        """One picklable object per rank, in rank order. Collective."""
        mine = _pickled(obj)
        everyones = self.say(mine.size, mine[:SMALL])
        lengths = everyones[:, 0]
        if lengths.max() <= SMALL:  # one wait instead of two
            rows = everyones[:, 1:].view(np.uint8)
            return [pickle.loads(row[:n]) for row, n in zip(rows, lengths.tolist(), strict=True)]
        ends = np.cumsum(lengths)
        whole = np.empty(int(ends[-1]), dtype=np.uint8)
        self.gather_bytes(mine, lengths, 0, whole if self.rank == 0 else None)
        self.bcast_bytes(whole)
        return [pickle.loads(whole[e - n : e]) for e, n in zip(ends.tolist(), lengths.tolist(), strict=True)]

    def allgather_int(self, value: int) -> np.ndarray:
        """i64[size], the value of each rank. Collective."""
        return self.say(value)[:, 0]

    def exscan(self, value: int) -> int:
        """Sum of the values of all lower ranks; 0 on rank 0. Collective."""
        out = np.zeros(1, dtype=np.int64)
        self.wait(self.comm.Iexscan(np.array([value], dtype=np.int64), out, op=self.mpi.SUM))
        return int(out[0]) if self.rank else 0  # MPI leaves rank 0's value undefined

    def allreduce_sum(self, value: int) -> int:
        """Collective."""
        return self._allreduce(value, self.mpi.SUM)

    def allreduce_max(self, value: int) -> int:
        """Collective."""
        return self._allreduce(value, self.mpi.MAX)

    def allreduce_min(self, value: int) -> int:
        """Collective."""
        return self._allreduce(value, self.mpi.MIN)

    def _allreduce(self, value: int, op: Any) -> int:
        out = np.empty(1, dtype=np.int64)
        self.wait(self.comm.Iallreduce(np.array([value], dtype=np.int64), out, op=op))
        return int(out[0])

    def gather_bytes(self, mine: np.ndarray, lengths: np.ndarray, root: int, whole: np.ndarray | None) -> None:
        """Each rank's `mine`, one after another, into `whole` on rank `root`. Collective.

        mine : u8[lengths[rank]]; lengths : i64[size]; whole : u8[sum of lengths] on rank `root`, None elsewhere
        """
        ends, most = np.cumsum(lengths), self._most
        starts = ends - lengths
        for low in range(0, max(int(ends[-1]), 1), most):  # of the whole, as much as one call may bring
            first, last = np.clip(starts, low, low + most), np.clip(ends, low, low + most)
            into, at = None, int(starts[self.rank])
            if whole is not None:
                into = (whole[low : low + most], (last - first).tolist(), (first - low).tolist(), self.mpi.BYTE)
            part = mine[int(first[self.rank]) - at : int(last[self.rank]) - at]
            self.wait(self.comm.Igatherv([part, self.mpi.BYTE], into, root=root))


def library_of(comm: Any) -> Any:
    """mpi4py.MPI, or what stands for it where ranks meet without MPI."""
    library = getattr(comm, "library", None)
    if library is None:
        from mpi4py import MPI

        return MPI
    return library


def _pickled(obj: Any) -> np.ndarray:
    return np.frombuffer(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), dtype=np.uint8)
