"""What the ranks exchange at the start of a loop."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pario.comm.solo import Solo
from pario.loader.meeting import Meeting
from pario.options import Options
from pario.stats.rank import RankStats
from pario.tune.live_knobs import Knobs


class Recording(Solo):
    """Keeps what this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def allgather(self, obj: Any) -> list[Any]:
        self.sent.append(pickle.dumps(obj))
        return super().allgather(obj)

    def gather_array(self, a: np.ndarray, root: int = 0) -> np.ndarray | None:
        self.sent.append(a.tobytes())
        return super().gather_array(a, root)


def loops(world: Solo, metrics: str | None = None, loud: tuple[int, ...] = ()) -> Meeting:
    """Three loops of 5, 6 and 7 records; INFO is logged in the meetings after those in `loud`."""
    stats, log = RankStats(), logging.getLogger("pario")
    meeting = Meeting(world, "/x", stats, metrics, Knobs(Options(), reads=True))
    for epoch, records in enumerate((5, 6, 7)):
        meeting.meet(f"epoch {epoch}", ("w", False))
        meeting.loop_begins()
        stats.records += records
        meeting.loop_ends(epoch, complete=True)
        log.setLevel(logging.INFO if epoch in loud else logging.WARNING)
    meeting.meet("close")
    return meeting


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    log = logging.getLogger("pario")
    before = log.level
    log.setLevel(logging.WARNING)
    yield
    log.setLevel(before)


def test_counters_do_not_travel_unless_somebody_reads_them(tmp_path: Path) -> None:
    world = Recording()
    meeting = loops(world)
    assert len(world.sent) == 4
    assert max(map(len, world.sent)) < 100
    counters = len(pickle.dumps(list(vars(meeting.so_far()).values())))
    assert meeting.report(all_ranks=True).total["records"] == 18
    assert len(world.sent) == 6
    assert len(world.sent[-1]) >= counters > 200
    loops(with_file := Recording(), str(tmp_path / "x.prom"))
    assert len(with_file.sent) == 7
    assert "pario_records_total{" in (tmp_path / "x.prom").read_text()


def test_a_line_tells_of_its_own_loop(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the loops before it were not logged."""
    loops(Solo(), loud=(1,))
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("epoch 1: 6 records in ")
