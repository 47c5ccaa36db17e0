"""Solo: one process that is its own node, and no MPI library at all."""

from __future__ import annotations

import numpy as np

from pario.comm.agree import Alarm
from pario.comm.base import AnyWorld, check_open
from pario.comm.memory import private_bytes


class Solo(AnyWorld):
    """One process that is its own node, without other ranks."""

    def __init__(self) -> None:
        self.alarm = Alarm(self)

    def __repr__(self) -> str:
        return "Solo()"

    def shared_bytes(self, nbytes: int) -> np.ndarray:
        """Private to this process."""
        check_open(self)
        return private_bytes(nbytes)
