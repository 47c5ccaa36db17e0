"""The alarm, over a communicator that is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pario.comm.agree import Alarm
from pario.errors import PeerError


class Played:
    """A communicator of two ranks whose receives never complete, and whose sends arrive at once in `to`."""

    def __init__(self) -> None:
        self.to: np.ndarray | None = None

    def Irecv(self, data: Any, source: int, tag: int) -> Any:
        self.buffer = data[0]
        return SimpleNamespace(Test=lambda: False)

    def Isend(self, data: Any, dest: int, tag: int) -> Any:
        assert self.to is not None
        self.to[:] = data[0]
        return SimpleNamespace(Test=lambda: True)


def alarm(comm: Played, rank: int) -> Alarm:
    mpi = SimpleNamespace(ANY_SOURCE=-1, BYTE="byte", Is_finalized=lambda: False, Exception=RuntimeError)
    world: Any = SimpleNamespace(size=2, rank=rank, comm=comm, mpi=mpi, settled=True, is_freed=False)
    return Alarm(world)


@pytest.mark.parametrize("text", ["no turn for anybody", "x" * 5000])
def test_a_note_is_heard_though_its_receive_never_completes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pario.comm.agree.spread", lambda world, error, known=True: error)  # ends no job here
    fails, hears = Played(), Played()
    one, other = alarm(fails, 0), alarm(hears, 1)
    other.check()
    fails.to = hears.buffer
    one.raise_all(ZeroDivisionError(text))
    with pytest.raises(PeerError, match=rf"another rank failed: ZeroDivisionError: {text[:1000]}"):
        other.check()
    other.check()  # once
    for each in (one, other):
        each._world.mpi.Is_finalized = lambda: True
        each.close()
