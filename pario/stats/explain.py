"""One sentence that names the slow part.

Reading, decoding and the caller's own code work at the same time, with slots between them. In such a pipeline the
slowest part is busy nearly all the time and the others wait for it: the reader for a free slot, or the ranks for bytes.
So the part with the largest share of busy time limits the rest. Waiting inside the caller's code (for another rank, in
a collective) counts as that code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pario.stats.rank import RankStats
from pario.text import decimal_bytes, seconds

#: A prediction holds where a node got at least this share of the records per second that were foretold: C2's bar.
_HELD = 0.95
#: Waiting for bytes is worth mentioning from this share of the time on.
STALLED = 0.05

#: The others do not wait for a part that is busy for less than this share of the time.
_SLOW = 0.5

#: With fewer reads in flight per reading rank (mean), the ranks do not wait for the store.
_BUSY = 0.7

#: Where reads spend this part of their time waiting for the control plane, their rate is its share's.
_HELD_UP = 0.5

#: From this fraction of the permitted reads in flight on, all of them count as in use: a larger limit might help.
_TAKEN = 0.9

#: A rank stands out if it exceeds the median of the others by this factor and by this share of the time.
_FACTOR, _DISTANCE = 1.25, 0.1


def explain(ranks: Sequence[RankStats]) -> str:
    """One sentence about how these ranks spent their time in loops."""
    wall = max((rank.loop for rank in ranks), default=0.0)
    if wall <= 0 or not any(rank.batches for rank in ranks):
        return "no batch was taken yet"
    readers = [rank for rank in ranks if rank.reader]
    store = [rank.read / wall for rank in readers]
    plan = [rank.locate / wall for rank in readers]
    work = [rank.busy / wall for rank in ranks]
    if not readers and max(rank.lost for rank in ranks) > max(rank.busy for rank in ranks):
        return f"reading, which another rank does, was the slow part: {_waits(ranks, wall)}"
    slowest = max(max(store, default=0.0), max(plan, default=0.0), max(work))
    idle = f"the store was idle {1 - sum(store) / len(store):.0%} of the time" if store else ""
    compiled = max(rank.compiled for rank in ranks) / wall
    if compiled >= _SLOW * max(slowest, _SLOW):
        return f"compiling kernels was the slow part: {compiled:.0%} of the time; the next run here loads them"
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
    """Index of the value that stands out above the others, or None."""
    if len(values) < 2:
        return None
    k = max(range(len(values)), key=values.__getitem__)
    others = median([*values[:k], *values[k + 1 :]])
    return k if values[k] > _FACTOR * others and values[k] - others > _DISTANCE else None


def slow_part(one: RankStats, others: Sequence[RankStats]) -> str:
    """ "consumer" or "decode": by which of them this rank exceeds the others more. The ranks are compared, not the
    parts: on all ranks the decoder may cost more than the step."""
    excess = {what: getattr(one, what) - median(getattr(r, what) for r in others) for what in ("consumer", "decode")}
    return max(excess, key=excess.__getitem__)


def held_up(readers: Sequence[RankStats]) -> float:
    """The part of their time for which reads waited for the control plane, if their rate is its share; else 0."""
    reading = sum(reader.reading for reader in readers)
    held = min(1.0, sum(reader.held for reader in readers) / reading) if reading else 0.0
    return held if held >= _HELD_UP else 0.0


def _store(ranks: Sequence[RankStats], readers: Sequence[RankStats], busy: Sequence[float], wall: float) -> str:
    if held := held_up(readers):
        return (
            f"the control plane's limit was the slow part: it let {_rate(readers)} through, and reads waited for it "
            f"{held:.0%} of their time; {_waits(ranks, wall)}"
        )
    k = odd_one(busy)
    if k is not None:
        one, others = readers[k], [reader for reader in readers if reader is not readers[k]]
        # A node with more ranks reads more; the store is not to blame.
        if _FACTOR * one.rate <= median(reader.rate for reader in others):
            return (
                f"reading on rank {one.rank} was the slow part: the store gave it {_rate([one])}, "
                f"and {_rate(others)} to {_others(len(others))}; {_waits(ranks, wall)}"
            )
    flight = sum(reader.in_flight for reader in readers)
    if flight < _BUSY * len(readers):  # time between reads: checks, threads waiting for a processor
        return (
            f"reading was the slow part, and not for the store: {_rate(readers)}, with a read under way only "
            f"{flight / len(readers):.0%} of that time; {_waits(ranks, wall)}"
        )
    # A tuned depth is where it is because of the store.
    depth = sum(0 if reader.tuned else reader.depth for reader in readers)
    reads = sum(reader.reads for reader in readers)
    if depth and reads and flight >= _TAKEN * depth:
        # Figures for a single prefetch depth cannot tell whether a read is slow by itself or queues behind others.
        latency = seconds(sum(reader.reading for reader in readers) / reads)
        all_of = f"all {depth:,} reads that inflight allows" if depth > 1 else "the one read that inflight allows"
        return (
            f"the store or the number of reads in flight was the slow part: it gave {_rate(readers)} with {all_of}, "
            f"{latency} each (a larger inflight helps if the store can answer more at once); {_waits(ranks, wall)}"
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
            computed = [rank.computed / wall for rank in ranks]
            if (k := odd_one(computed)) is not None:  # ranks that wait for it in a collective are as long in their code
                middle = f"{median(computed[:k] + computed[k + 1 :]):.0%} on {_others(len(ranks) - 1)}"
                slow += f", and on rank {ranks[k].rank} it computed {computed[k]:.0%} of the time ({middle})"
        else:
            slow = f"{_decoding(ranks)} was the slow part: it took {decode / wall:.0%} of the time"
        return f"{slow}; {_waits(ranks, wall)} and {idle}" if idle else f"{slow}; {_waits(ranks, wall)}"
    one, others = ranks[k], [rank for rank in ranks if rank is not ranks[k]]
    name = slow_part(one, others)
    own = getattr(one, name)
    slow = f"rank {one.rank}'s consumer" if name == "consumer" else f"{_decoding([one])} on rank {one.rank}"
    middle = median(getattr(r, name) for r in others)
    took = f"it took {own / wall:.0%} of the time ({middle / wall:.0%} on {_others(len(others))})"
    return "; ".join(filter(None, (f"{slow} was the slow part: {took}", _waits(others, wall, "the others"), idle)))


def _no_part(ranks: Sequence[RankStats], wall: float, idle: str) -> str:
    consumer, decode = (sum(getattr(r, what) for r in ranks) / len(ranks) / wall for what in ("consumer", "decode"))
    both = f"the consumers took {consumer:.0%} and {_decoding(ranks)} {decode:.0%}"
    took = f"no part was the slow one: {both} of the time"
    return "; ".join(filter(None, (took, _waits(ranks, wall), idle)))


def _waits(ranks: Sequence[RankStats], wall: float, who: str = "the ranks") -> str:
    """Words for how long these ranks waited for bytes."""
    shares = [rank.lost / wall for rank in ranks]
    who = f"rank {ranks[0].rank}" if len(ranks) == 1 else who
    if max(shares) < STALLED:
        return "no rank waited for bytes" if who == "the ranks" else f"{who} did not wait for bytes"
    most = max(range(len(ranks)), key=shares.__getitem__)
    mean = sum(shares) / len(shares)
    more = f" (rank {ranks[most].rank} {shares[most]:.0%})" if odd_one(shares) is not None else ""
    return f"{who} waited for bytes {mean:.0%} of the time{more}"


def _rate(readers: Sequence[RankStats]) -> str:
    """Rate at which the store served these readers together, over the time with reads in flight."""
    return f"{decimal_bytes(sum(reader.rate for reader in readers))}/s"


def _decoding(ranks: Sequence[RankStats]) -> str:
    """Words for how these ranks turned bytes into arrays."""
    if 2 * sum(rank.unpack for rank in ranks) > sum(rank.decode for rank in ranks) > 0:
        return "unpacking and decoding"
    return "copying records into batches" if all(rank.copies for rank in ranks) else "decoding"


def _others(count: int) -> str:
    return "the other one" if count == 1 else f"the {count} others"


def _number(value: float, what: str) -> str:
    text = f"{value:.1f}".removesuffix(".0")
    return f"{text} {what}{'' if text == '1' else 's'}"


def unpacking_words(ranks: Sequence[RankStats], prediction: Mapping[str, Any] | None) -> str:
    """One line: bytes before and after, the threads' seconds, and whether the prediction held; "" if nothing was
    packed.

    prediction : `Selection.prediction` of codec/select.py, from the reserved entry
    """
    packed, unpacked = sum(r.packed_bytes for r in ranks), sum(r.unpacked_bytes for r in ranks)
    took, records = sum(r.unpack for r in ranks), sum(r.records for r in ranks)
    if not packed or not took:
        return ""
    words = (
        f"unpacked {decimal_bytes(packed)} to {decimal_bytes(unpacked)} ({unpacked / packed:.2f} times as many) in "
        f"{seconds(took)} of all threads together, {decimal_bytes(unpacked / took)}/s each"
    )
    return words if prediction is None else f"{words}; {_held(prediction, ranks, records)}"


def _held(prediction: Mapping[str, Any], ranks: Sequence[RankStats], records: int) -> str:
    """Whether the records per second and node, and the thread's seconds per record, are those that were foretold. The
    prediction knows of the codec and the store. Where the loop is slower for another reason (the caller computes, the
    decoder makes arrays of what was unpacked), it held if neither of these was."""
    try:
        codec, rate, cost = str(prediction["codec"]), prediction["records_per_second"], prediction["decode_seconds"]
        rate, cost = float(rate), float(cost)
    except (KeyError, TypeError, ValueError):
        return "the prediction that was saved with it cannot be read"
    slowest, nodes = max(ranks, key=lambda rank: rank.loop), len({rank.node for rank in ranks})
    if not records or not slowest.loop or rate <= 0:
        return "too little was read to say whether the prediction held"
    mine = records / slowest.loop / nodes
    figures = f"{mine:,.0f} records/s per node of {rate:,.0f} foretold"
    each = sum(rank.unpack for rank in ranks) / records
    held = mine >= _HELD * rate
    if not held and slowest.consumer >= _HELD * slowest.loop:
        held, figures = True, f"{figures}, and the loop waited {1 - slowest.consumer / slowest.loop:.1%} of its time"
    elif not held and each <= cost / _HELD and slowest.stalled <= (1 - _HELD) * slowest.loop:
        held, figures = True, f"{figures}, and neither unpacking nor the store was the reason"
    return (
        f"the prediction for {codec} {'held' if held else 'did not hold'}: {figures}, "
        f"{seconds(each)} per record in a thread of {seconds(cost)}"
    )
