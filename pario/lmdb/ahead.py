"""Announced values, read ahead of those who will ask for them.

    tell(keys) --> look-up --> table: TOLD --> reads, as many in flight --> memory: HERE --> `get` of any process
                   (several)   in the order    as the law of the Loader's   (told.py) marks what it took
                                of the keys    depth says

* Values are read in the order in which they were announced, and one is dropped as soon as it was read as often as it
  was announced. A value that somebody reads from the file because it had not come yet is not read for him again.
* How many wait at a time follows from what is asked for: few while those who ask find what they want, twice as many
  when they do not. The memory has a budget of bytes besides.
* What was announced and is not asked for while others are read goes after a while: its reader may have died.
* Pages on the way to the values are put there, too: other processes need not read them from the store.
* Before anybody sees a value, the file's meta page is compared with the snapshot, after it was read.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pario.errors import ParioError
from pario.fetch.base import Fetcher
from pario.fetch.pool import ReadPool
from pario.fetch.snapshot import check_snapshot
from pario.format.meta import Snapshot
from pario.lmdb import told
from pario.lmdb.stock import Late, Pages, Stock
from pario.lmdb.told import ToldMemory
from pario.records import EXTENT
from pario.threads import Workers, start_thread
from pario.tune.knobs import START_DEPTH, Knob

_log = logging.getLogger("pario")

#: Keys that one thread looks up at once: few, so that the first reads begin soon.
_KEYS = 8
#: Threads that look keys up: their pages may have to come from the store.
_LOOKERS = 8
#: Reads in flight at most, whatever the law says.
_MOST_READS = 64
#: Announced values in the table at most.
_MOST_TOLD = 4096
#: A value that has been here while this many times as many were asked for, and this many more, is not waited for any
#: longer. (Twice as many and 64: eight workers with batches of 16 read that far while one of them was late, and one
#: record in three was read twice.)
_FORGET, _FORGET_LEAST = 4, 1024
#: A value that is on its way is waited for this long, and this many latencies of the store.
_PATIENCE_S, _LATENCIES = 0.02, 8.0
#: Seconds between two looks for each value that is here: some twenty times as long as it takes to look at it.
_LOOK_S = 2e-6


class Found(NamedTuple):
    """Where a key led.

    pages : (number, bytes) of each page on the way, None for those that `has_page`
    offset, nbytes : of its value in the file with the header before it, if it lies in pages of its own, else 0 bytes
    """

    pages: list[tuple[int, bytes | None]]
    offset: int
    nbytes: int


Look = Callable[[Sequence[Any]], list[Found]]


class _Group:
    """Keys that are looked up at once. asked : reads of anybody when they were announced"""

    __slots__ = ("asked", "found", "keys", "look")

    def __init__(self, keys: Sequence[Any], look: Look, asked: int) -> None:
        self.keys, self.look, self.asked = keys, look, asked
        self.found: list[Found] | None = None


class _Value:
    """A value in the table.

    waiting : how often it was announced and its turn has not come; promised : how often it is to be read out of memory
    used : how many of the times that it was taken have been counted; since : reads of anybody when it came
    """

    __slots__ = ("nbytes", "offset", "promised", "since", "slot", "state", "used", "waiting")

    def __init__(self, slot: int, offset: int, nbytes: int) -> None:
        self.slot, self.offset, self.nbytes = slot, offset, nbytes
        self.waiting = self.promised = self.used = self.since = 0
        self.state = told.TOLD


class Ahead:
    """Reads what is announced of one snapshot of one file, in threads of this process.

    file : stays open; snapshot : of the file; budget : bytes of values that are here or on their way
    memory : of one of the same snapshot that has ended in this process; None: a new one

    memory : for other processes
    counts : brought, read directly, forgotten, refused (no room, or the store failed)
    Raises OSError, ParioError.
    """

    def __init__(self, file: Fetcher, snapshot: Snapshot, budget: int, memory: ToldMemory | None = None) -> None:
        self._pid = os.getpid()
        self._file, self._snapshot, self._budget = file, snapshot, budget
        self.memory = memory or ToldMemory.made()
        self.counts = {"brought": 0, "direct": 0, "cached": 0, "forgotten": 0, "refused": 0}
        self.most_reads = 0
        self._pool = ReadPool(file, Knob("announced values in flight", 1, _MOST_READS, START_DEPTH))
        self._pool.follow(self._is_full)
        self._lookers = Workers("pario-look", _LOOKERS)
        # Guards all that follows. The garbage collector may call `end` while this thread holds it.
        self._news = threading.Condition(threading.RLock())
        self._groups: deque[_Group] = deque()  # not looked up yet
        self._looking: deque[_Group] = deque()
        self._turns: deque[_Value] = deque()  # the order in which values are to be read
        self._values: dict[int, _Value] = {}  # offset -> value in the table
        self._here: dict[int, _Value] = {}  # those that are here, the oldest first
        self._coming = 0
        self._reading = 0  # of these: not read yet
        self._bytes = 0  # of those that are here or coming
        self._arrived: list[tuple[_Value, np.ndarray]] = []
        self._late, self._pages, self._stock = Late(self.memory), Pages(self.memory), Stock()
        self._sweep_at = 0.0
        self._blocked = self._ended = False
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        start_thread("pario-told", _manage, weakref.ref(self), self._news, stop=partial(self.end, False))

    def tell(self, keys: Sequence[Any], look: Look) -> None:
        """These will be asked for, behind those that were announced before. look(keys) -> [Found, ...] of those that
        exist, any thread; what it raises leaves these keys out."""
        with self._news:
            if not self._ended:
                asked = self.memory.words[told.ASKED]
                self._groups.extend(_Group(keys[at : at + _KEYS], look, asked) for at in range(0, len(keys), _KEYS))
                self._go_on()
                self._news.notify_all()

    def join(self, user: object) -> bool:
        """`user` tells from now on, until `leave`. False: this has ended, or lives in the parent of this process."""
        if os.getpid() != self._pid:
            return False
        with self._news:
            if not self._ended:
                self._users.add(user)
            return not self._ended

    def leave(self, user: object) -> bool:
        """The last one's leave is the end: True then."""
        with self._news:
            self._users.discard(user)
            is_last = not len(self._users)
            if is_last:
                self.end()
        return is_last

    def end(self, waits: bool = True) -> None:
        """Read no more, and give all memory back; does not wait for the store. Idempotent.

        waits : for the lock, which a thread may hold that runs no more
        """
        if os.getpid() != self._pid or not self._news.acquire(blocking=waits):  # in a fork: the parent goes on
            return
        try:
            if self._ended:
                return
            self._ended = True
            for things in (self._groups, self._looking, self._turns):
                things.clear()
            self._news.notify_all()
            self.memory.end()
        finally:
            self._news.release()
        self._lookers.end(0, cancel=True)
        self._pool.close(0)
        _log.debug("%s: announced values: %s", self._file.path, self.counts)

    def __del__(self, _over: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end a thread that held the lock stands still for ever, and the system frees everything.
        if not _over() and hasattr(self, "_ended"):
            self.end()

    def has_page(self, page: int) -> bool:
        """Any thread."""
        return page in self._pages

    @property
    def held_bytes(self) -> int:
        """Of values that are here or on their way."""
        return self._bytes

    def _is_full(self) -> bool:
        """Called under the pool's lock: takes none."""
        if self._here and self.memory.words[told.MISSED] == self._stock.missed:
            return True  # nobody has waited of late: more reads in flight would help nobody
        return len(self._here) >= min(self._stock.size // 2, len(self._here) + self._coming + len(self._turns))

    # -- with the lock held --------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        while self._looking and self._looking[0].found is not None:
            self._take_turns(self._looking.popleft())
        self._feed()
        running = sum(group.found is None for group in self._looking)
        known = len(self._turns) + len(self._here) + _KEYS * len(self._looking)
        while self._groups and running < _LOOKERS and known < _MOST_TOLD and self._pages.has_room():
            group = self._groups.popleft()
            self._looking.append(group)
            running, known = running + 1, known + _KEYS
            try:
                self._lookers.put(partial(self._look_up, group))
            except ParioError:  # the system grants no thread now; the next look at what was read tries again
                self._groups.appendleft(self._looking.pop())
                raise

    def _take_turns(self, group: _Group) -> None:
        asked = self._late.note(True)
        page_size = self._snapshot.page_size
        for one in group.found or []:
            for page, content in one.pages:
                self._pages.keep(page, content, asked, not one.nbytes)
            if not one.nbytes or one.nbytes > self._budget:
                continue
            if self._late.take(one.offset // page_size, group.asked):
                self.counts["direct"] += 1
                continue
            value = self._values.get(one.offset)
            if value is None:
                slot = self.memory.add(one.offset // page_size)
                if not slot:
                    self.counts["refused"] += 1
                    continue
                value = self._values[one.offset] = _Value(slot, one.offset, one.nbytes)
            value.waiting += 1
            self._turns.append(value)

    def _feed(self) -> None:
        """Read values whose turn it is, as long as there is room, and reads are wanted."""
        self._blocked = False
        while self._turns and self._reading <= self._pool.inflight and not self._ended:
            value = self._turns[0]
            if value.state in (told.COMING, told.HERE):
                value.promised += 1
            elif self.memory.taken(value.slot) > value.used:  # somebody could not wait for it
                value.used += 1
                self.counts["direct"] += 1
            elif _is_cached(self._file, value):
                self.counts["cached"] += 1
            else:
                if not self._has_room(value.nbytes):
                    self._blocked = self._stock.was_full = True
                    break
                value.promised += 1
                self._read(value)
            self._turns.popleft()
            value.waiting -= 1
            self._forget_unused(value)

    def _has_room(self, nbytes: int) -> bool:
        if len(self._here) + self._coming >= self._stock.size:
            return False
        return not self._bytes or self._bytes + nbytes <= self._budget

    def _read(self, value: _Value) -> None:
        value.state = told.COMING
        self.memory.words[value.slot + told.NBYTES] = value.nbytes
        self.memory.use(value.slot, told.COMING)
        self._coming += 1
        self._reading += 1
        self._bytes += value.nbytes
        self.most_reads = max(self.most_reads, min(self._reading, self._pool.inflight))
        out = np.empty(value.nbytes, np.uint8)
        extent = np.array([(value.offset, value.nbytes)], EXTENT)
        try:
            self._pool.submit(extent, out, np.zeros(1, np.int64), lambda error, _: self._was_read(value, out, error))
        except ParioError as e:
            self._reading -= 1
            self._failed(value, e)

    def _failed(self, value: _Value, error: BaseException) -> None:
        """The one who asks for it meets the error."""
        self.counts["refused"] += 1
        self._coming -= 1
        self._let_go(value)
        _log.debug("%s: an announced value could not be read: %s", self._file.path, error)

    def _let_go(self, value: _Value) -> None:
        """It is here no more."""
        if self._ended:
            return
        self._here.pop(value.offset, None)
        self._bytes -= value.nbytes
        self.memory.drop(value.slot, told.TOLD)
        value.state, value.promised, value.used = told.TOLD, 0, self.memory.taken(value.slot)
        self._forget_unused(value)

    def _forget_unused(self, value: _Value) -> None:
        if value.state == told.TOLD and not value.waiting and value.offset in self._values:
            del self._values[value.offset]
            self.memory.drop(value.slot, 0)

    def _sweep(self) -> None:
        """Let go what was read, and what nobody seems to want."""
        now = time.monotonic()
        if now < self._sweep_at:
            return
        self._sweep_at = now + _LOOK_S * len(self._here)
        words, asked = self.memory.words, self.memory.words[told.ASKED]
        patience = asked - _FORGET * self._stock.size - _FORGET_LEAST
        lost = False
        for value in list(self._here.values()):
            if words[value.slot + told.TAKEN] - value.used >= value.promised:
                self._let_go(value)
            elif self._blocked and value.since < patience:
                self.counts["forgotten"] += 1
                self._let_go(value)
                lost = True
        if lost:
            self._catch_up()
        self._stock.look(words, len(self._here))

    def _catch_up(self) -> None:
        """The order is another one, or begins anew: leave out what stands before the first value that is read now."""
        taken = [k for k, value in enumerate(self._turns) if self.memory.taken(value.slot) > value.used]
        for _ in range(taken[0] if taken else 0):
            value = self._turns.popleft()
            value.waiting -= 1
            self._forget_unused(value)
            self.counts["forgotten"] += 1

    # -- threads -------------------------------------------------------------------------------------------------------

    def _look_up(self, group: _Group) -> None:
        found: list[Found] = []
        try:
            found = group.look(group.keys)
        except Exception as e:  # the reader of such a key is told
            if not self._ended:
                _log.info("%s: records that were announced are not brought: %s", self._file.path, e)
        with self._news:
            if not self._ended:
                group.found = found
                with suppress(ParioError):
                    self._go_on()
                self._news.notify_all()

    def _was_read(self, value: _Value, out: np.ndarray, error: BaseException | None) -> None:
        with self._news:
            if self._ended:
                return
            self._reading -= 1
            if error is not None:
                self._failed(value, error)
            else:
                self._arrived.append((value, out))
            self._feed()
            self._news.notify_all()

    def _publish(self) -> float:
        """Show what has been read, and go on; returns for how long there is nothing to do, unless there is news."""
        with self._news:
            arrived, self._arrived = self._arrived, []
        if arrived:
            check_snapshot(self._file, self._snapshot)
            self._pool.note_full()
        with self._news:
            if self._ended:
                return 0.0
            for value, out in arrived:
                self._coming -= 1
                value.state, value.since = told.HERE, self.memory.words[told.ASKED]
                if self.memory.put(value.slot, out):
                    self._here[value.offset] = value
                    self.counts["brought"] += 1
                else:
                    self.counts["refused"] += 1
                    self._let_go(value)
            latency = self._pool.latency
            self.memory.words[told.PATIENCE] = int(1e6 * (_PATIENCE_S + _LATENCIES * latency))
            self._late.note(bool(self._groups or self._looking))
            self._sweep()
            try:
                self._go_on()
            except ParioError:
                return 1.0
            if self._arrived:
                return 0.0
            if not self._blocked and not (self._groups and not self._looking):
                return 1.0
            return self._stock.pause_s(len(self._here))


def _is_cached(file: Fetcher, value: _Value) -> bool:
    """The kernel has it already: nothing is faster."""
    try:
        return file.cached_share(value.offset, max(1, value.nbytes)) == 1.0
    except (OSError, ParioError):
        return False


def _manage(ref: weakref.ref[Ahead], news: threading.Condition) -> None:
    """The thread that publishes; does not keep the object alive while it waits."""
    wait_s = 0.0
    while True:
        ahead = ref()
        if ahead is None or ahead._ended:
            return
        try:
            wait_s = ahead._publish()
        except (ParioError, OSError) as e:
            _log.info("%s: what was announced is not brought any more: %s", ahead._file.path, e)
            ahead.end()
            return
        del ahead
        with news:
            ahead = ref()
            nothing_new = ahead is not None and not ahead._arrived and not ahead._ended
            del ahead
            if wait_s and nothing_new:
                news.wait(wait_s)
