"""A token bucket of bytes and operations: it lets reads begin at a rate that may change at any time.

A read is let in as soon as there is no debt, whatever its size, and leaves a debt of as many tokens as it takes. So a
read that is larger than the bucket need not be divided, and nobody waits for tokens that it will not use: what was
asked for earlier is paid for by waiting, not what is asked for now.

Debts are kept in seconds until they are paid, as in the generic cell rate algorithm (ITU-T I.371): anyone who comes
knows at once when it may go on, and waits for the time alone, not for those before it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pario.text import decimal_bytes
from pario.threads import Condition

#: (bytes/s, operations/s); None: no limit
Rates = tuple[float | None, float | None]

UNLIMITED: Rates = (None, None)
BYTES, OPERATIONS = 0, 1

#: Seconds' worth of tokens that a bucket keeps: a reader that comes a little late loses nothing, and a window of one
#: second sees at most a tenth more than the rate.
BURST_S = 0.1
#: Nobody waits for less, which a clock may not even show; the debt stays.
_SOON_S = 1e-6


def rates_words(rates: Sequence[float | None]) -> list[str]:
    """rates : bytes/s and operations/s; None: no limit, of which nothing is said"""
    nbytes, operations = rates
    words = [f"{decimal_bytes(nbytes)}/s"] if nbytes else []
    return [*words, f"{operations:,.0f} operations/s"] if operations else words


class Tokens:
    """The tokens of one resource, without clock or threads: `now` is in seconds, and never goes back.

    due : when there will be no debt; if that was before now, the tokens of the seconds since then are there, of
        `BURST_S` at most
    """

    def __init__(self, rate: float | None, now: float) -> None:
        self._rate = rate or math.inf
        self.due = now - BURST_S

    def take(self, n: float, now: float) -> None:
        self.due = max(self.due, now - BURST_S) + n / self._rate

    def set_rate(self, rate: float | None, now: float) -> None:
        """Nobody waits longer because the rate changes: a debt that was made at a higher rate shrinks with it."""
        before, self._rate = self._rate, rate or math.inf
        if self.due <= now:
            kept = BURST_S if before == math.inf else (now - self.due) * before / self._rate
            self.due = now - min(kept, BURST_S)
        else:
            self.due = now + min(1.0, before / self._rate) * (self.due - now)


@dataclass(eq=False)
class _Waiting:
    """What is taken. at : when it may be asked for; before : what was due, of each resource, when all before it had
    gone on"""

    wants: tuple[int, int]
    at: float = 0.0
    before: Sequence[float] = ()


class Bucket:
    """Any thread may take tokens; threads that wait go on in the order in which they came.

    rates : above 0, or None
    held_up() : called when a thread has to wait and no other one does; must not block
    clock() : seconds that never go back; wait(condition, seconds) : lets a thread wait for the condition, which is
        held. Tests hand in their own

    rates : as they are set now; used : [bytes, operations] taken so far
    """

    def __init__(
        self,
        rates: Rates = UNLIMITED,
        *,
        held_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[Condition, float], object] = Condition.wait,
    ) -> None:
        self._clock, self._wait, self._held_up = clock, wait, held_up
        self._changed = Condition()  # a signal's handler, or the garbage collector, may come where it is held
        now = clock()
        self.rates = rates
        self._tokens = [Tokens(rate, now) for rate in rates]
        self._waiting: list[_Waiting] = []  # those who were let in at another time than they came, in order
        self._open = True
        self.used = [0, 0]
        self._waited = [0.0, 0.0]  # by the first one, for which resource, until `_counted`
        self._counted = self._since = now  # when `hold_ups` was asked last

    def take(self, nbytes: int, operations: int) -> None:
        """Return when these may be asked of the store; at once after `close`."""
        with self._changed:
            now, mine = self._clock(), _Waiting((nbytes, operations))
            self._let_in(mine, now)
            if self._open and mine.at - now > _SOON_S:
                self._stand_in_line(mine)
            self.used[BYTES] += nbytes
            self.used[OPERATIONS] += operations

    def _let_in(self, mine: _Waiting, now: float) -> None:
        """Take its tokens, as of the moment when there is no debt of what it wants, and all before it have gone on."""
        mine.before = [tokens.due for tokens in self._tokens]
        owed = [due for due, n in zip(mine.before, mine.wants, strict=True) if n]
        mine.at = max([now, *owed, *(each.at for each in self._waiting[-1:])])
        for tokens, n in zip(self._tokens, mine.wants, strict=True):
            tokens.take(n, mine.at)

    def _stand_in_line(self, mine: _Waiting) -> None:
        if not self._waiting:
            self._held_up()
        self._count()
        self._waiting.append(mine)
        try:
            while self._open and (left := mine.at - self._clock()) > _SOON_S:
                self._wait(self._changed, left)
        except BaseException:  # Ctrl-C: it takes nothing
            self._let_in_again(self.rates, mine)
            raise
        finally:
            self._count()
            self._waiting = [each for each in self._waiting if each is not mine]

    def _count(self) -> None:
        now = self._clock()
        if self._waiting:
            for_bytes, for_operations = self._waiting[0].before
            self._waited[for_operations > for_bytes] += now - self._counted
        self._counted = now

    def set_rates(self, rates: Rates) -> None:
        """From now on, also for those who wait."""
        with self._changed:
            self._let_in_again(rates)

    def _let_in_again(self, rates: Rates, without: _Waiting | None = None) -> None:
        now, self.rates = self._clock(), rates
        later = [each for each in self._waiting if each.at > now]
        self._waiting = [each for each in self._waiting if each.at <= now]
        for which, (tokens, rate) in enumerate(zip(self._tokens, rates, strict=True)):
            if later:
                tokens.due = later[0].before[which]
            tokens.set_rate(rate, now)
        for each in later:
            if each is not without:
                self._let_in(each, now)
                self._waiting.append(each)
        self._changed.notify_all()

    def hold_ups(self) -> tuple[float, float, float]:
        """(seconds since the last call, and for how many of them threads were held up for bytes, and for operations)"""
        with self._changed:
            self._count()
            over, self._since = self._counted - self._since, self._counted
            waited, self._waited = self._waited, [0.0, 0.0]
        return over, waited[BYTES], waited[OPERATIONS]

    def close(self) -> None:
        """Anyone who waits goes on, and nobody waits any more. Idempotent."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
