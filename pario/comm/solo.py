"""Solo: one process that is its own node, and no MPI library at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pario.comm.agree import Alarm
from pario.comm.base import AnyWorld, array_of_one_dimension
from pario.comm.memory import private_bytes
from pario.errors import ClosedError, OptionError


class Solo(AnyWorld):
    """One process that is its own node, without other ranks."""

    size = nodes = node_size = 1
    rank = node = node_rank = node_seat = seat = 0
    is_leader = True
    node_ranks = job_ranks = (0,)
    mpi = None

    def __init__(self) -> None:
        self._freed = False
        self.on_wait: Callable[[], None] | None = None
        self.alive_seconds = 1.0
        self.alarm = Alarm(self)

    def __repr__(self) -> str:
        return "Solo()"

    def barrier(self) -> None:
        self._check_open()

    node_barrier = barrier

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        self._check_open()
        return obj

    node_bcast = bcast

    def allgather(self, obj: Any) -> list[Any]:
        self._check_open()
        return [obj]

    def exscan(self, value: int) -> int:
        self._check_open()
        return 0

    def allreduce_sum(self, value: int) -> int:
        self._check_open()
        return int(value)

    allreduce_max = allreduce_min = allreduce_sum

    def gather_array(self, a: np.ndarray, root: int = 0) -> np.ndarray | None:
        """A copy of `a`."""
        self._check_open()
        return array_of_one_dimension(a).copy()

    def share_array(self, a: np.ndarray | None) -> np.ndarray:
        """`a` itself as a read-only view."""
        self._check_open()
        if a is None:
            raise OptionError("share_array needs the array on rank 0, got None")
        view = a.view()
        view.flags.writeable = False
        return view

    def shared_bytes(self, nbytes: int) -> np.ndarray:
        """Private to this process."""
        self._check_open()
        return private_bytes(nbytes)

    def check_alive(self, left: Callable[[int], bool] | None = None) -> None:
        pass

    def agree(self, error: BaseException | None, doing: str) -> None:
        if error is not None:
            raise error

    def raised_by_all(self, error: BaseException) -> BaseException:
        return error

    def goodbye(self) -> Callable[[], bool]:
        return lambda: True

    def close(self, collective: bool = True) -> None:
        self._freed = True

    def abandon(self, error: BaseException) -> None:
        self._freed = True

    def _check_open(self) -> None:
        if self._freed:
            raise ClosedError("this Solo was freed")
