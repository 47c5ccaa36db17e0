"""A mixture of several sources by weight: which record of which source is drawn at which position of an epoch.

Two pure functions follow each other:

    position -> (source, how many of this source were drawn before)     `Turns`: exact shares, the same in every epoch
    draw     -> record                                                  `MixedOrder`: one pass through the source after
                                                                        another, each in a new order

The shares are fractions units[k] / period. In every prefix of an epoch the number of draws of source k differs from its
share of the prefix by less than 1: of the sources that another draw does not put ahead of their share by 1, the one has
its turn that would be behind first (earliest deadline first; the quota method of Balinski and Young). So turns repeat
after `period` draws, and a table of one period answers for every position.

    units 2, 1 and period 3      turns     0 1 0 | 0 1 0 | 0 1 ...

An epoch has as many draws as the sources have records together. A source that is drawn more often than it has records
comes again, in another order per pass; one that is drawn less often goes on in the next epoch where it stopped. So
between two passes of a source each of its records comes once, whatever its weight.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from pario.errors import OptionError
from pario.kernels import permute as kernels
from pario.plan.epoch import Order

#: Shares are multiples of a fraction that is no smaller than 1 / MOST_PERIOD. Others are rounded to such ones.
MOST_PERIOD = 1 << 16
_MOST_ROUNDED = 4096
#: Passes of one source whose permutations are kept.
_KEPT = 2


def as_units(weights: Any) -> tuple[int, ...]:
    """The whole numbers that have the proportions of these weights, which may have any sum: (0.7, 0.3) -> (7, 3).

    Exact if their sum is then at most MOST_PERIOD, a float being the simplest fraction with its digits; else rounded so
    that it is, and each source keeps at least 1. Raises OptionError for weights that are not finite and above 0.
    """
    try:
        given = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        given = []
    if not given or not all(0 < weight < math.inf for weight in given):
        raise OptionError(f"weights must be numbers above 0, got {weights!r}")
    exact = [Fraction(repr(weight)) for weight in given]
    whole = _whole(exact)
    if sum(whole) <= MOST_PERIOD:
        return whole
    if len(whole) > _MOST_ROUNDED:
        raise OptionError(
            f"{len(whole)} weights have no common denominator of at most {MOST_PERIOD}; no more than {_MOST_ROUNDED} "
            "are rounded to one",
            hint="Give whole numbers with a smaller sum.",
        )
    total = sum(exact)
    shares = [weight / total * MOST_PERIOD for weight in exact]
    units = [max(1, math.floor(share)) for share in shares]
    # What rounding down left goes to those that lost most; what the least ones got too much the largest ones give.
    left = MOST_PERIOD - sum(units)
    for k in sorted(range(len(units)), key=lambda k: (units[k] - shares[k], k))[: max(0, left)]:
        units[k] += 1
    for _ in range(-left):
        units[max(range(len(units)), key=units.__getitem__)] -= 1
    return _whole([Fraction(unit) for unit in units])


def _whole(fractions: Sequence[Fraction]) -> tuple[int, ...]:
    """The smallest whole numbers with these proportions."""
    times = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * times) for fraction in fractions]
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


@cache
def turns(units: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(source u16[period], before i64[period]) of one period of turns, read-only: whose turn it is, and how many turns
    of this period that source had before."""
    period = sum(units)
    source = np.empty(period, np.uint16)
    before = np.empty(period, np.int64)
    # Draw i of a source with u units may come at position floor(i * period / u) at the earliest, and must come before
    # ceil((i + 1) * period / u). Of those that may come, the one that must come first has its turn.
    waiting = [(0, k, 0) for k in range(len(units))]  # (earliest position, source, draw)
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []  # (latest position, source, draw)
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            _, k, i = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(i + 1) * period // units[k]), k, i))
        _, k, i = heapq.heappop(ready)
        source[position], before[position] = k, i
        if i + 1 < units[k]:
            heapq.heappush(waiting, ((i + 1) * period // units[k], k, i + 1))
    source.flags.writeable = before.flags.writeable = False
    return source, before


@dataclass(frozen=True)
class Mixture:
    """Sources and their shares.

    units : share of each source, in parts of their sum
    sizes : records of each source. Records are numbered through the sources, one after the other
    places : u32[n] or u64[n]: what is delivered for each of these numbers; None: the number itself
    digest : of the places
    """

    units: tuple[int, ...]
    sizes: tuple[int, ...]
    places: np.ndarray | None = field(default=None, compare=False, repr=False)
    digest: str = ""

    def __post_init__(self) -> None:
        if len(self.units) != len(self.sizes) or not self.units:
            raise OptionError(f"{len(self.units)} weights for {len(self.sizes)} sources")
        if min(self.units) < 1 or min(self.sizes) < 1 or sum(self.units) > MOST_PERIOD:
            raise OptionError(f"units {self.units} of sources with {self.sizes} records")

    @property
    def n(self) -> int:
        """Draws of an epoch."""
        return sum(self.sizes)

    @property
    def mark(self) -> str:
        """What a saved state says of it."""
        shares = " ".join(f"{unit}:{size}" for unit, size in zip(self.units, self.sizes, strict=True))
        return f"{shares} {self.digest}".rstrip()

    @property
    def period(self) -> int:
        return sum(self.units)

    def drawn(self, position: int) -> tuple[int, ...]:
        """How many of each source the first `position` draws of an epoch are."""
        whole, rest = divmod(position, self.period)
        source, _ = turns(self.units)
        more = np.bincount(source[:rest], minlength=len(self.units)).tolist()
        return tuple(whole * unit + extra for unit, extra in zip(self.units, more, strict=True))

    def draws(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source i64[k], draw i64[k]) of these positions (i64[k]) of an epoch: whose turn it is, and how many of this
        source were drawn before in this epoch."""
        source, before = turns(self.units)
        whole, rest = np.divmod(positions, self.period)
        sources = source[rest].astype(np.int64)
        return sources, whole * np.array(self.units, np.int64)[sources] + before[rest]


class MixedOrder(Order):
    """The order of one epoch of a mixture. Its numbers are those of records, some more than once, others not at all.

    Holds permutations of 4 bytes per record of a source (8 from 2^32 records on), of the latest passes through each.

    shuffle : False: each source in key order; "global": in a new order in each pass through it
    """

    space = "id"

    def __init__(self, mixture: Mixture, shuffle: bool | str, seed: int, epoch: int) -> None:
        if shuffle not in (False, "global"):
            raise OptionError(f'a mixture is drawn record by record: shuffle=False or "global", got {shuffle!r}')
        self.n = mixture.n
        self.mixture = mixture
        self._shuffled = shuffle == "global"
        self._seed = np.uint64(seed)
        sizes = np.array(mixture.sizes, np.int64)
        self._sizes = sizes
        self._firsts = np.cumsum(sizes) - sizes
        #: draws of each source in the epochs before
        self._drawn = np.array([epoch * drawn for drawn in mixture.drawn(self.n)], np.int64)
        self._tables: dict[tuple[int, int], np.ndarray] = {}

    def ids(self, start: int, stop: int) -> np.ndarray:
        self._check(start, stop)
        return self.take(np.arange(start, stop, dtype=np.int64))

    def take(self, positions: np.ndarray) -> np.ndarray:
        sources, draws = self.mixture.draws(np.asarray(positions, np.int64))
        passes, at = np.divmod(draws + self._drawn[sources], self._sizes[sources])
        if self._shuffled:
            # Few passes, except through tiny sources.
            order = np.lexsort((passes, sources))
            new = (np.diff(sources[order], prepend=-1) != 0) | (np.diff(passes[order], prepend=-1) != 0)
            for mine in np.split(order, np.flatnonzero(new)[1:]):
                if len(mine):
                    at[mine] = self._table(int(sources[mine[0]]), int(passes[mine[0]]))[at[mine]]
        numbers = self._firsts[sources] + at
        places = self.mixture.places
        return numbers if places is None else places[numbers].astype(np.int64)

    def _table(self, source: int, which: int) -> np.ndarray:
        """The permutation of one pass. Two threads may make the same one at once."""
        table = self._tables.get((source, which))
        if table is None:
            n = self.mixture.sizes[source]
            table = np.empty(n, np.uint32 if n < 1 << 32 else np.uint64)
            key = np.uint64(kernels.stream_key(self._seed, np.uint64(which), np.uint64(kernels.STREAM_MIXED)))
            kernels.permute(np.uint64(kernels.absorb(key, source)), table)
            old = [one for one in list(self._tables) if one[0] == source][: -_KEPT + 1]
            for one in old:
                self._tables.pop(one, None)
            self._tables[source, which] = table
        return table
