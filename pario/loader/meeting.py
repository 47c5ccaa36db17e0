"""The meeting of all ranks before an epoch, for a report, and at the end. They compare what they are about to do, and
exchange their counters."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import NamedTuple

from pario.comm.base import AnyWorld
from pario.control.live_knobs import Knobs
from pario.errors import OptionError
from pario.stats.prometheus import write_metrics
from pario.stats.rank import RankStats
from pario.stats.report import Report

__all__ = ["Meeting", "Met"]

_log = logging.getLogger("pario")


class Met(NamedTuple):
    """report : counters of all ranks
    ways : the proposal of each node's first rank
    """

    report: Report
    ways: dict[int, str]


class Meeting:
    """One rank's side of the meetings; keeps the time of its loops and, on rank 0, the log and the metrics of all.

    path : the dataset
    knobs : this rank's
    metrics_file : see `Options`; a file that cannot be written is found here, on rank 0
    """

    def __init__(self, world: AnyWorld, path: str, stats: RankStats, metrics_file: str | None, knobs: Knobs) -> None:
        self._world = world
        self._path = path
        self._stats = stats
        self._knobs = knobs
        self._metrics_file = metrics_file
        self._loop_since: float | None = None
        self._ended: tuple[int, bool] | None = None  # (epoch, complete) of a loop that is not in the log yet
        self._told: Report | None = None  # the report at the last log entry; rank 0

    def try_metrics(self) -> None:
        """Raise OptionError now, not after an epoch, if the file is not writable. On rank 0."""
        if self._metrics_file is None:
            return
        try:
            write_metrics(Report(self._path, [self._stats]), self._metrics_file)
        except OSError as e:
            raise OptionError(
                f"metrics_file cannot be written: {e.strerror}",
                path=self._metrics_file,
                rank=self._world.rank,
                hint="Rank 0 writes it: name a folder of rank 0's node that exists and is writable.",
            ) from e

    def loop_begins(self) -> None:
        self._loop_since = time.perf_counter()

    def loop_ends(self, epoch: int, complete: bool) -> None:
        """Note the end of a loop for the next meeting's log entry."""
        self._stats.loop = self.so_far().loop
        self._loop_since = None
        self._ended = (epoch, complete)

    def so_far(self) -> RankStats:
        """This rank's counters, including the running loop."""
        under_way = 0.0 if self._loop_since is None else time.perf_counter() - self._loop_since
        depth, reason = self._knobs["inflight"].setting
        return replace(
            self._stats,
            loop=self._stats.loop + under_way,
            depth=depth,
            depth_reason=reason,
            knobs=self._knobs.published(),
        )

    def meet(self, doing: str, way: str = "") -> Met:
        """All ranks do the same next, or all raise OptionError. Collective.

        way : this rank's proposal for its node, on the node's first rank
        """
        everyones = self._world.allgather((doing, way, *vars(self.so_far()).values()))
        first = everyones[0][0]
        for rank, (theirs, *_) in enumerate(everyones):
            if theirs != first:
                error = OptionError(
                    f"the ranks go different ways: {first!r} on rank 0, {theirs!r} on rank {rank}",
                    hint="Each rank must run the same loops over the loader, and call set_epoch, load_state_dict, "
                    "report and close alike.",
                )
                raise self._world.raised_by_all(error)
        report = Report(self._path, [RankStats(*numbers) for _, _, *numbers in everyones])
        ways: dict[int, str] = {}
        for (_, theirs, *_), numbers in zip(everyones, report.ranks, strict=True):
            ways[numbers.node] = max(theirs, ways.get(numbers.node, ""))
        ended, self._ended = self._ended, None
        if ended is not None and self._world.rank == 0:
            self._tell(report, *ended)
        return Met(report, ways)

    def _tell(self, report: Report, epoch: int, complete: bool) -> None:
        """Log the loop that has ended since the last meeting."""
        if _log.isEnabledFor(logging.INFO):
            line = report.since(self._told).line(complete=complete)
            _log.info("epoch %d%s: %s", epoch, "" if complete else ", left early", line)
        self._told = report
        if self._metrics_file is not None:
            try:
                write_metrics(report, self._metrics_file)
            except OSError as e:  # a full disk for monitoring must not end the training
                _log.warning("metrics not written: %s", e)
