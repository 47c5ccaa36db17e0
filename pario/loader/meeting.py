"""The meeting of all ranks before an epoch, for a report, and at the end. They compare what they are about to do in one
small message each; counters travel only where somebody reads them."""

from __future__ import annotations

import io
import logging
import os
import pickle
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pario.comm.alive import roll_call
from pario.comm.base import AnyWorld
from pario.comm.launcher import job_name
from pario.errors import OptionError
from pario.fetch.limited import LimitedFetcher
from pario.kernels.cache import KernelCache
from pario.machine import absolute
from pario.stats.rank import RankStats
from pario.tune.live_knobs import Knobs

if TYPE_CHECKING:
    from pario.stats.report import Report

_log = logging.getLogger("pario")


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
        self._metrics_file = metrics_file and absolute(os.path.expanduser(metrics_file))
        self._loop_since: tuple[float, float] | None = None
        self._ended: tuple[int, bool] | None = None  # (epoch, complete) of a loop that is not in the log yet
        self._told = RankStats()  # the counters when the last loop was told
        self._held_before = LimitedFetcher.waited_s

    def try_metrics(self) -> None:
        """Raise OptionError now, not after an epoch, if the file is not writable. On rank 0."""
        if self._metrics_file is None:
            return
        from pario.stats.prometheus import write_metrics
        from pario.stats.report import Report

        try:
            write_metrics(Report(self._path, [self._stats]), self._metrics_file, job_name()[0])
        except OSError as e:
            raise OptionError(
                f"metrics_file cannot be written: {e.strerror}",
                path=self._metrics_file,
                rank=self._world.rank,
                hint="Rank 0 writes it: name a folder of rank 0's node that exists and is writable.",
            ) from e

    def loop_begins(self) -> None:
        self._loop_since = time.perf_counter(), KernelCache.spent_s

    def loop_ends(self, epoch: int, complete: bool) -> None:
        """Note the end of a loop for the next meeting's log entry."""
        now = self.so_far()
        self._stats.loop, self._stats.compiled = now.loop, now.compiled
        self._loop_since = None
        self._ended = (epoch, complete)

    def so_far(self) -> RankStats:
        """This rank's counters, including the running loop."""
        now, spent = time.perf_counter(), KernelCache.spent_s
        begin, before = self._loop_since or (now, spent)
        depth, reason = self._knobs["inflight"].setting
        return replace(
            self._stats,
            loop=self._stats.loop + now - begin,
            compiled=self._stats.compiled + spent - before,
            held=LimitedFetcher.waited_s - self._held_before,
            depth=depth,
            depth_reason=reason,
            knobs=self._knobs.published(),
        )

    def meet(self, doing: str, way: tuple[str, bool] = ("", False)) -> dict[int, tuple[str, bool]]:
        """All ranks do the same next, or all raise OptionError. Collective.

        way : what `Supply.propose` and `is_prepared` say, on the node's first rank
        Returns that of each node's first rank.
        """
        ended, self._ended = self._ended, None
        tells = self._metrics_file is not None or _log.isEnabledFor(logging.INFO)
        where = f"the start of {doing.partition(' from')[0]}" if doing.startswith("epoch") else f"the {doing}"
        with roll_call(self._world, where):
            everyones = self._world.allgather((doing, self._world.node, way, ended is not None, tells))
        first, *_, has_ended, tells = everyones[0]  # what rank 0 says
        for rank, (theirs, *_) in enumerate(everyones):
            if theirs != first:
                error = OptionError(
                    f"the ranks go different ways: {first!r} on rank 0, {theirs!r} on rank {rank}",
                    hint="Each rank must run the same loops over the loader, and call set_epoch, load_state_dict, "
                    "report and close alike.",
                )
                raise self._world.raised_by_all(error)
        if has_ended:
            now = self.so_far()
            loop, self._told = now - self._told, now
            if tells:
                self._gather(now, loop, ended)
        ways: dict[int, tuple[str, bool]] = {}
        for _, node, theirs, *_ in everyones:
            ways[node] = max(theirs, ways.get(node, theirs))
        return ways

    def report(self, all_ranks: bool) -> Report:
        """What this rank did so far; or all ranks, which is collective."""
        from pario.stats.report import Report

        if not all_ranks:
            return Report(self._path, [self.so_far()], of=self._world.size)
        before, _ = self._told, self.meet("report")
        now = self.so_far() if self._told is before else self._told  # as the log has just said it
        everyones = self._world.allgather(list(vars(now).values()))
        return Report(self._path, [RankStats(*numbers) for numbers in everyones])

    def _gather(self, now: RankStats, loop: RankStats, ended: tuple[int, bool] | None) -> None:
        """Log the loop that has ended, and write the metrics; on rank 0. Collective."""
        mine = pickle.dumps([list(vars(each).values()) for each in (now, loop)])
        pickled = self._world.gather_array(np.frombuffer(mine, np.uint8))
        if pickled is None or ended is None:
            return
        from pario.stats.prometheus import write_metrics
        from pario.stats.report import Report

        parts = io.BytesIO(pickled.tobytes())
        both = zip(*(pickle.load(parts) for _ in range(self._world.size)), strict=True)
        report, of_loop = (Report(self._path, [RankStats(*each) for each in ranks]) for ranks in both)
        epoch, complete = ended
        if _log.isEnabledFor(logging.INFO):
            _log.info("epoch %d%s: %s", epoch, "" if complete else ", left early", of_loop.line(complete=complete))
        if self._metrics_file is not None:
            try:
                write_metrics(report, self._metrics_file, job_name()[0])
            except OSError as e:  # a full disk for monitoring must not end the training
                _log.warning("metrics not written: %s", e)
