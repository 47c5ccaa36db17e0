"""A token bucket of bytes and operations: it lets reads begin at a rate that may change at any time.

A read is let in as soon as there is no debt, whatever its size, and leaves a debt of as many tokens as it takes. So a
read that is larger than the bucket need not be divided, and nobody waits for tokens that it will not use: what was
asked for earlier is paid for by waiting, not what is asked for now.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from pario.text import decimal_bytes

#: (bytes/s, operations/s); None: no limit
Rates = tuple[float | None, float | None]

UNLIMITED: Rates = (None, None)
BYTES, OPERATIONS = 0, 1

#: Seconds' worth of tokens that a bucket keeps: a reader that comes a little late loses nothing, and a window of one
#: second sees at most a tenth more than the rate.
BURST_S = 0.1
#: One who does not go on this long after its time lets the next one pass, in seconds.
_LATE_S = 0.1
#: Nobody waits for less, which a clock may not even show; the debt stays.
_SOON_S = 1e-6


def rates_words(rates: Sequence[float | None]) -> list[str]:
    """rates : bytes/s and operations/s; None: no limit, of which nothing is said"""
    nbytes, operations = rates
    words = [f"{decimal_bytes(nbytes)}/s"] if nbytes else []
    return [*words, f"{operations:,.0f} operations/s"] if operations else words


class Tokens:
    """The tokens of one resource, without clock or threads: `now` is in seconds, and never goes back.

    level : may be negative, which is a debt
    """

    def __init__(self, rate: float | None, now: float) -> None:
        self.rate = rate
        self._at = now
        self.level = 0.0 if rate is None else rate * BURST_S

    def wait_s(self, now: float) -> float:
        """Seconds until there is no debt."""
        if self.rate is None:
            return 0.0
        level = min(self.level + (now - self._at) * self.rate, self.rate * BURST_S)
        self.level, self._at = level, now
        return -level / self.rate if level < -_SOON_S * self.rate else 0.0

    def spend(self, n: float) -> None:
        """After `wait_s` has returned 0 for this moment."""
        if self.rate is not None:
            self.level -= n

    def set_rate(self, rate: float | None, now: float) -> None:
        """Nobody waits longer because the rate changes: a debt that was made at a higher rate shrinks with it."""
        wait_s = self.wait_s(now)
        before, self.rate, self._at = self.rate, rate, now
        if rate is None:
            self.level = 0.0
        elif before is None:
            self.level = rate * BURST_S
        elif wait_s:
            self.level *= min(1.0, rate / before)
        else:
            self.level = min(self.level, rate * BURST_S)


class Bucket:
    """Any thread may take tokens; threads that wait get in one after another, in the order in which they came.

    rates : above 0, or None
    held_up() : called when a thread has to wait and no other one does; must not block
    clock() : seconds that never go back; wait(condition, seconds) : lets a thread wait for the condition, which is
        held. Tests hand in their own

    used : [bytes, operations] taken so far
    """

    def __init__(
        self,
        rates: Rates = UNLIMITED,
        *,
        held_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float | None], object] = threading.Condition.wait,
    ) -> None:
        self._clock, self._wait, self._held_up = clock, wait, held_up
        self._lock = threading.RLock()  # a signal's handler, or the garbage collector, may come where it is held
        now = clock()
        self._bytes, self._operations = (Tokens(rate, now) for rate in rates)
        self._line: deque[threading.Condition] = deque()
        self._open = True
        self.used = [0, 0]
        self._waited = [0.0, 0.0]  # by the first of the line, for which resource
        self._began: float | None = None  # when the first of the line began to wait, and for which resource
        self._which = BYTES
        self._due: dict[threading.Condition, float] = {}  # when those that have been the first were to go on
        self._since = now  # when `hold_ups` was asked last

    def take(self, nbytes: int, operations: int) -> None:
        """Return when these may be asked of the store; at once after `close`."""
        with self._lock:
            if self._line or self._missing(self._clock(), nbytes, operations)[0] > 0:
                self._stand_in_line(nbytes, operations)
            self._bytes.spend(nbytes)
            self._operations.spend(operations)
            self.used[BYTES] += nbytes
            self.used[OPERATIONS] += operations

    def _stand_in_line(self, nbytes: int, operations: int) -> None:
        mine = threading.Condition(self._lock)
        if not self._line:
            self._held_up()
        self._line.append(mine)
        try:
            while self._open:
                if self._line[0] is not mine:
                    second = self._line[1] is mine
                    if second and self._clock() > self._due.get(self._line[0], math.inf) + _LATE_S:
                        # On top of the first one a signal's handler may run that waits for this one.
                        self._line.remove(mine)
                        self._line.appendleft(mine)
                    else:
                        self._wait(mine, _LATE_S if second else None)
                    continue
                began = self._clock()
                wait_s, which = self._missing(began, nbytes, operations)
                if wait_s <= 0:
                    break
                self._began, self._which, self._due[mine] = began, which, began + wait_s
                self._wait(mine, wait_s)
                self._waited[which] += self._clock() - max(began, self._since)
                self._began = None
        finally:
            if self._line[0] is mine:
                self._began = None
            self._line.remove(mine)
            self._due.pop(mine, None)
            for each in islice(self._line, 2):
                each.notify()

    def _missing(self, now: float, nbytes: int, operations: int) -> tuple[float, int]:
        """(seconds to wait, for which resource)"""
        if not self._open:
            return 0.0, BYTES
        bytes_s, operations_s = self._bytes.wait_s(now), self._operations.wait_s(now)
        if not nbytes or operations_s > bytes_s:
            return (operations_s if operations else 0.0), OPERATIONS
        return bytes_s, BYTES

    @property
    def rates(self) -> Rates:
        """As they are set now."""
        return self._bytes.rate, self._operations.rate

    def set_rates(self, rates: Rates) -> None:
        """From now on, also for those who wait."""
        with self._lock:
            now = self._clock()
            self._bytes.set_rate(rates[BYTES], now)
            self._operations.set_rate(rates[OPERATIONS], now)
            if self._line:
                self._line[0].notify()

    def hold_ups(self) -> tuple[float, float, float]:
        """(seconds since the last call, and for how many of them threads were held up for bytes, and for operations)"""
        with self._lock:
            now = self._clock()
            waited = list(self._waited)
            if self._began is not None:  # somebody still waits
                waited[self._which] += now - max(self._began, self._since)
            over, self._since, self._waited = now - self._since, now, [0.0, 0.0]
        return over, waited[BYTES], waited[OPERATIONS]

    def close(self) -> None:
        """Anyone who waits goes on, and nobody waits any more. Idempotent."""
        with self._lock:
            self._open = False
            for each in self._line:
                each.notify()
