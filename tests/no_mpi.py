"""In the place of mpi4py, and of its module MPI, where this was imported first, in jobs without MPI (start_ranks.py):
as much as the tests of MPI use, over the connections that pario made."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from pario.comm.launcher import announced
from pario.comm.messages import Messages, wait_politely
from pario.comm.star import Star, StarComm, join

_job = announced()
assert _job is not None, "start_ranks.py starts this"
_star = join(_job, "a test")
IN_PLACE = object()


class _Sent:
    """What a note's sender holds."""

    def __init__(self, request: Any) -> None:
        self.Test = request.Test

    def Wait(self) -> None:
        wait_politely(self)


class Intracomm(StarComm):
    """With the calls that wait."""

    def _wait(self, request: Any) -> None:
        wait_politely(request, self.library.check)

    def _messages(self) -> Messages:
        return Messages(self, self._wait)

    def Barrier(self) -> None:
        self._wait(self.Ibarrier())

    barrier = Barrier

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        return self._messages().bcast(obj, root)

    def allgather(self, obj: Any) -> list[Any]:
        return self._messages().allgather(obj)

    def allreduce(self, value: Any) -> Any:
        return sum(self.allgather(value))

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        everyones = self.allgather(obj)
        return everyones if self.rank == root else None

    def Iallreduce(self, mine: Any, into: np.ndarray, op: Any = Star.SUM) -> Any:
        return super().Iallreduce(into.copy() if mine is IN_PLACE else mine, into, op)

    def Isend(self, data: Any, dest: int, tag: int = 0) -> Any:
        return _Sent(super().Isend(data, dest, tag))

    def Iprobe(self, source: int = -1, tag: int = 0) -> bool:
        return super().Iprobe(source, tag)

    def Recv(self, into: np.ndarray, source: int, tag: int = 0) -> None:
        self._wait(self.Irecv(into, source, tag))

    def Free(self) -> None: ...

    def Abort(self, status: int) -> None:
        os._exit(status)


_star.COMM_WORLD = COMM_WORLD = Intracomm(_star, b"everyone", range(_star.size))
COMM_SELF = _star.COMM_SELF = Intracomm(_star, b"%08d" % _star.rank, [_star.rank])
Exception = _star.Exception
COMM_NULL, COMM_TYPE_SHARED = Star.COMM_NULL, Star.COMM_TYPE_SHARED


MPI = sys.modules["mpi4py"] = sys.modules["mpi4py.MPI"] = sys.modules[__name__]


def get_vendor() -> tuple[str, tuple[int, ...]]:
    return "no MPI", (0,)


def Is_initialized() -> bool:
    return False


def Is_finalized() -> bool:
    return False
