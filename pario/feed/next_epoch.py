"""A ring writer that goes on into the next epoch, so that the next epoch's first batch does not wait for the store.

    this epoch's thread     the last group is under way -> plan group j of the next epoch -> wait for a slot that nobody
                            needs any more -> hand its reads to the pool
    pool threads            read straight into the slot, check, and keep quiet
    start of the next one   all ranks have met -> write the tables of these groups, publish those that are there

The ring's words and tables belong to this epoch until its end. So what is read ahead is known to its writer alone,
fills at most the ring, and can be dropped without a trace: by a loop that begins elsewhere, by `close`, by an error. A
group that could not be read ahead is read again when its epoch begins, and only then an error is one.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

from pario.errors import RankError
from pario.feed.ring_writer import Group, RingWriter
from pario.feed.source import Context
from pario.plan.stream import Work

_log = logging.getLogger("pario")


class ContinuingWriter(RingWriter):
    """A `RingWriter` that reads the first groups of the next epoch, too.

    follow : gives the writer of the next epoch when this one has nothing left to read, or None. Called in its thread
    before : the writer of the epoch before, if that one reads this epoch's first groups
    """

    def __init__(
        self,
        context: Context,
        work: Work,
        base: int,
        follow: Callable[[ContinuingWriter], ContinuingWriter | None],
        before: ContinuingWriter | None = None,
    ) -> None:
        super().__init__(context, work, base)
        self.begins_at = work.epoch, work.start
        self.next_work = Work(work.stream, work.shape, work.epoch + 1, 0)
        self.next_base = (base + self._schedule.groups) % self._slots.count
        self.following: ContinuingWriter | None = None
        self._follow = follow
        self._turning = threading.RLock()  # guards those below
        self._has_begun = before is None
        self._dropped = False
        self._last = False  # nothing is to be read ahead
        self._planned: dict[int, Group] = {}  # read ahead, or under way
        self._there: set[int] = set()

    # -- of this epoch ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        with self._turning:
            self._has_begun, self._dropped = True, False
            self._early = frozenset(self._planned)
            for group in self._planned.values():
                self._write_tables(group)
            self._planned.clear()
            for j in sorted(self._there):
                super()._hand_out(j)
        super().start()

    def _hand_out(self, j: int) -> None:
        with self._turning:
            self._there.add(j)
            if self._has_begun:
                super()._hand_out(j)

    def _lose(self, group: Group, error: BaseException) -> None:
        with self._turning:
            if not self._has_begun:
                self._planned.pop(group.number, None)
                self._dropped = True  # the store may be in trouble: no more until the epoch begins
            if self._dropped:
                return
        super()._lose(group, error)

    # -- ahead of the next one -------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        super()._read_all()
        if not self._stop.is_set() and self.error is None:
            try:
                self._read_on()
            except RankError:
                raise
            except Exception as e:  # it is an error of the next epoch, if there is one
                _log.debug("nothing was read ahead of the next epoch: %s", e)

    def _read_on(self) -> None:
        if self._ring.deserted():  # by a `break`: what is under way is of no use
            self._withdraw()
        del self._order  # it may be large, and the next one is made now
        following = None if self._last else self._follow(self)
        if following is None:
            return
        self.following = following
        if self._last:  # said meanwhile, by somebody who did not see `following`
            self.following = None
            return
        self._ahead = following._there
        following._read_ahead(self)
        if following._dropped:
            following._jobs.clear()

    def _read_ahead(self, before: ContinuingWriter) -> None:
        """Read the first groups into slots that `before` needs no more, in its thread."""
        for j in range(min(self._schedule.groups, self._slots.count)):
            group = self._plan(j)
            if not before._gives(before._schedule.groups + j - self._slots.count):
                return
            with self._turning:
                if self._dropped:
                    return
                self._planned[j] = group
                self._submit_group(group)

    def _gives(self, j: int) -> bool:
        """Wait until nobody needs the slot of group j any more; False if `cancel` was called."""
        if (
            j >= 0
            and self._ring.wait_done(self._schedule.group_release_tick(j), None, self._stop)
            and not self._ring.full_slots(self._base + j)
        ):
            self._withdraw()  # all ranks have left: it may be under way
        return not self._stop.is_set()

    def _withdraw(self, limit_s: float = math.inf) -> bool:
        """End what is under way; waits for reads in flight. Returns whether they ended within `limit_s`."""
        with self._turning:
            self._dropped = True
        for job in list(self._jobs):
            self._pool.withdraw(job)
        self._jobs.clear()
        return self._in_flight.wait(limit_s)

    def go_no_further(self, limit_s: float = math.inf) -> bool:
        """Forget what was read ahead of the next epoch, and read nothing more. Any thread. Returns whether its reads
        ended within `limit_s` seconds. Idempotent. With 0 it takes no lock: the garbage collector may call it."""
        self._last = True
        following, self.following = self.following, None
        if following is None:
            return True
        following._dropped = True
        if not limit_s:
            following._jobs.clear()  # they refer to it, and to the ring
        return limit_s > 0 and following._withdraw(limit_s)
