"""Which part was the slow one, in a sentence.

Reading, decoding and the caller's own code work at the same time, with full slots between them. In such a chain the
slowest part is busy nearly always, and the others wait for it: bytes for a free slot, or ranks for bytes. So the part
with the largest share of busy time is the one to look at. What a rank waits for inside the caller's code (another
rank, in a collective) counts as that code.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pario.stats.rank import RankStats
from pario.words import decimal_bytes

__all__ = ["STALLED", "explain", "odd_one"]

#: From this share of the time on waiting for bytes is worth a sentence.
STALLED = 0.05

#: A part that is busy for less of the time is not what the others wait for.
_SLOW = 0.5

#: With fewer reads under way per reading rank, mean, it is not the store that they wait for.
_BUSY = 0.7

#: One rank stands out when it is this much above the median of the others, as a factor and in shares of the time.
_FACTOR, _DISTANCE = 1.25, 0.1


def explain(ranks: Sequence[RankStats]) -> str:
    """One sentence about the time that these ranks spent in their loops."""
    wall = max((rank.loop for rank in ranks), default=0.0)
    if wall <= 0 or not any(rank.batches for rank in ranks):
        return "no batch was taken yet"
    readers = [rank for rank in ranks if rank.reader]
    store = [rank.read / wall for rank in readers]
    plan = [rank.locate / wall for rank in readers]
    work = [rank.busy / wall for rank in ranks]
    slowest = max(max(store, default=0.0), max(plan, default=0.0), max(work))
    idle = f"the store was idle {1 - sum(store) / len(store):.0%} of the time" if store else ""
    if slowest < _SLOW:
        return _no_part(ranks, wall, idle)
    if slowest == max(store, default=0.0):
        return _store(ranks, readers, store, wall)
    if slowest == max(plan, default=0.0):
        rank = readers[plan.index(slowest)].rank
        what = f"working out which bytes to read was the slow part: {slowest:.0%} of the time on rank {rank}"
        return f"{what}; {_waits(ranks, wall)} and {idle}"
    return _rank(ranks, work, wall, idle)


def odd_one(values: Sequence[float]) -> int | None:
    """Index of the value that stands out above the others, if one does."""
    if len(values) < 2:
        return None
    k = max(range(len(values)), key=values.__getitem__)
    others = median([*values[:k], *values[k + 1 :]])
    return k if values[k] > _FACTOR * others and values[k] - others > _DISTANCE else None


def _store(ranks: Sequence[RankStats], readers: Sequence[RankStats], busy: Sequence[float], wall: float) -> str:
    k = odd_one(busy)
    if k is not None:
        one, others = readers[k], [reader for reader in readers if reader is not readers[k]]
        # A node with more ranks reads more, and that is not the store's fault.
        if _FACTOR * one.rate <= median(reader.rate for reader in others):
            return (
                f"reading on rank {one.rank} was the slow part: the store gave it {_rate([one])}, "
                f"and {_rate(others)} to {_others(len(others))}; {_waits(ranks, wall)}"
            )
    if all(reader.own for reader in readers):
        return f"reading through the page cache was the slow part: {_rate(readers)}"
    flight = sum(reader.in_flight for reader in readers)
    if flight < _BUSY * len(readers):  # the time between the reads: checks, threads that wait for a processor
        return (
            f"reading was the slow part, and not for the store: {_rate(readers)}, with a read under way only "
            f"{flight / len(readers):.0%} of that time; {_waits(ranks, wall)}"
        )
    return (
        f"the store was the slow part: it gave {_rate(readers)} with {_number(flight, 'read')} in flight; "
        f"{_waits(ranks, wall)}"
    )


def _rank(ranks: Sequence[RankStats], work: Sequence[float], wall: float, idle: str) -> str:
    k = odd_one(work)
    if k is None:
        consumer, decode = (sum(getattr(r, what) for r in ranks) / len(ranks) for what in ("consumer", "decode"))
        if consumer >= decode:
            what = "the training loop's own code" if len(ranks) > 1 else "the consumer's own code"
            slow = f"{what} was the slow part: it took {consumer / wall:.0%} of the time"
        else:
            slow = f"decoding was the slow part: it took {decode / wall:.0%} of the time"
        return f"{slow}; {_waits(ranks, wall)} and {idle}" if idle else f"{slow}; {_waits(ranks, wall)}"
    one, others = ranks[k], [rank for rank in ranks if rank is not ranks[k]]
    # What sets it apart from the others, not what is larger: all may have decoders that cost more than their steps.
    excess = {what: getattr(one, what) - median(getattr(r, what) for r in others) for what in ("consumer", "decode")}
    name = max(excess, key=excess.__getitem__)
    own = getattr(one, name)
    slow = f"rank {one.rank}'s consumer" if name == "consumer" else f"decoding on rank {one.rank}"
    middle = median(getattr(r, name) for r in others)
    took = f"it took {own / wall:.0%} of the time ({middle / wall:.0%} on {_others(len(others))})"
    return "; ".join(filter(None, (f"{slow} was the slow part: {took}", _waits(others, wall, "the others"), idle)))


def _no_part(ranks: Sequence[RankStats], wall: float, idle: str) -> str:
    mean = {what: sum(getattr(r, what) for r in ranks) / len(ranks) / wall for what in ("consumer", "decode")}
    return "; ".join(
        filter(
            None,
            (
                f"no part was the slow one: the consumers took {mean['consumer']:.0%} and decoding "
                f"{mean['decode']:.0%} of the time",
                _waits(ranks, wall),
                idle,
            ),
        )
    )


def _waits(ranks: Sequence[RankStats], wall: float, who: str = "the ranks") -> str:
    """How long these ranks waited for bytes."""
    shares = [rank.lost / wall for rank in ranks]
    who = f"rank {ranks[0].rank}" if len(ranks) == 1 else who
    if max(shares) < STALLED:
        return "no rank waited for bytes" if who == "the ranks" else f"{who} did not wait for bytes"
    most = max(range(len(ranks)), key=shares.__getitem__)
    mean = sum(shares) / len(shares)
    more = f" (rank {ranks[most].rank} {shares[most]:.0%})" if odd_one(shares) is not None else ""
    return f"{who} waited for bytes {mean:.0%} of the time{more}"


def _rate(readers: Sequence[RankStats]) -> str:
    """What these readers got from the store together, while it had something to do."""
    return f"{decimal_bytes(sum(reader.rate for reader in readers))}/s"


def _others(count: int) -> str:
    return "the other one" if count == 1 else f"the {count} others"


def _number(value: float, what: str) -> str:
    text = f"{value:.1f}".removesuffix(".0")
    return f"{text} {what}{'' if text == '1' else 's'}"
