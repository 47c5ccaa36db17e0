"""What a plane knows of each process, one row of columns each: thousands of reports are taken, and thousands of grants
are made, by a few passes over arrays.

Pairs are (bytes, operations).
"""

from __future__ import annotations

import math

import numpy as np

#: Seconds over which a row's peak is the largest rate that was seen, since jobs read in bursts; kept in parts.
_PEAK_S = 2.0
_PARTS = 4
#: Nobody uses more, whatever it says of its clock.
_MOST = 1e18
#: A grant that changes by a smaller part is told with the next report only.
_SAME = 0.02

#: of a row: shape, and what is in it when it is new
_COLUMNS = {
    **{name: ((), math.nan) for name in ("until", "at")},
    **{name: ((2,), 0.0) for name in ("used", "peak", "now")},
    **{name: ((2,), math.inf) for name in ("wants", "rates", "safe")},
    "reported": ((), False),
    "_parts": ((_PARTS + 1, 2), 0.0),
    "_numbers": ((_PARTS + 1,), -(1 << 62)),  # of the part of time in which each was seen
    "_told": ((4,), math.nan),  # 1 / rates and 1 / safe as they were told last
}


class Table:
    """Rows are numbers, given and taken back; times are seconds on the caller's clock.

    until : f64[n], when its lease ends
    at, used : f64[n], f64[n, 2], of its last report; at is nan before the first one of a connection
    wants, peak, now : f64[n, 2] per second: what it claims (inf: as much as it can get), the most that it has used of
        late, and what it used last
    rates, safe : f64[n, 2], its grant
    reported : bool[n], it is to hear of its grant
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._n = 0
        self.until = self.at = np.empty(0)
        self.used = self.peak = self.now = np.empty((0, 2))
        self.wants = self.rates = self.safe = np.empty((0, 2))
        self.reported = np.empty(0, bool)
        self._parts, self._numbers, self._told = np.empty(0), np.empty(0), np.empty(0)
        self._grow(64)

    def _grow(self, n: int) -> None:
        for name, (shape, value) in _COLUMNS.items():
            column = np.full((n, *shape), value, type(value))
            if self._n:
                column[: self._n] = getattr(self, name)
            setattr(self, name, column)
        self._free.extend(range(n - 1, self._n - 1, -1))
        self._n = n

    def __len__(self) -> int:
        """Rows that are somebody's."""
        return self._n - len(self._free)

    def add(self) -> int:
        """A row."""
        if not self._free:
            self._grow(2 * self._n)
        row = self._free.pop()
        for name, (_, value) in _COLUMNS.items():
            getattr(self, name)[row] = value
        return row

    def begin(self, row: int, until: float) -> None:
        """It has a new connection, which is to hear of its grant."""
        self.until[row], self.at[row], self.reported[row] = until, math.nan, True

    def remove(self, row: int) -> None:
        """It may become another one's."""
        self._free.append(row)

    def use(self, rows: np.ndarray, now: np.ndarray, at: np.ndarray, used: np.ndarray, wants: np.ndarray) -> None:
        """Take reports. rows : i64[k], no two the same; now, at : f64[k]; used, wants : f64[k, 2]"""
        over = at - self.at[rows]
        good = over > 0  # not the first report of a connection, and its clock goes on
        with np.errstate(all="ignore"):
            rates = np.clip((used - self.used[rows]) / over[:, None], 0.0, _MOST)
        rates[~good] = 0.0
        self.now[rows[good]] = rates[good]
        self.at[rows], self.used[rows], self.wants[rows] = at, used, wants
        number = (now * (_PARTS / _PEAK_S)).astype(np.int64)
        part = number % (_PARTS + 1)
        fresh = self._numbers[rows, part] != number
        self._parts[rows, part] = np.maximum(rates, np.where(fresh[:, None], 0.0, self._parts[rows, part]))
        self._numbers[rows, part] = number
        valid = self._numbers[rows] >= number[:, None] - _PARTS
        self.peak[rows] = (self._parts[rows] * valid[:, :, None]).max(1)
        self.reported[rows] = True

    def claims(self, rows: np.ndarray, which: int, now: float) -> tuple[np.ndarray, np.ndarray]:
        """(f64[k], what each claims; f64[k], what of that its use has proven)"""
        peak = np.where(now < self.until[rows], self.peak[rows, which], 0.0)  # else it is silent for a lease
        # A job that reads in bursts wants in a moment what it has just used.
        wants = np.maximum(self.wants[rows, which], 1.25 * peak)
        return np.where(now < self.until[rows], wants, 0.0), 2 * peak

    def due(self) -> np.ndarray:
        """bool[n], the rows that are to hear of their grants: they have reported, or the grant is another one. They
        count as told from now on."""
        now = 1 / np.concatenate((self.rates, self.safe), axis=1)  # so that no limit is a number, too
        same = np.abs(now - self._told) <= _SAME * np.maximum(now, self._told)
        due = self.reported | ~same.all(1)
        self._told[due] = now[due]
        self.reported[:] = False
        return due
