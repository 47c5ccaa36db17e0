"""What unpacking cost, and whether the choice of the codec (`python -m pario choose`) foretold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pario.stats.rank import RankStats
from pario.text import decimal_bytes, seconds

__all__ = ["unpacking_words"]

#: A prediction holds where a node got at least this share of the records per second that were foretold: C2's bar.
_HELD = 0.95


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
    waited = slowest.read if slowest.own else slowest.stalled
    held = mine >= _HELD * rate
    if not held and slowest.consumer >= _HELD * slowest.loop:
        held, figures = True, f"{figures}, and the loop waited {1 - slowest.consumer / slowest.loop:.1%} of its time"
    elif not held and each <= cost / _HELD and waited <= (1 - _HELD) * slowest.loop:
        held, figures = True, f"{figures}, and neither unpacking nor the store was the reason"
    return (
        f"the prediction for {codec} {'held' if held else 'did not hold'}: {figures}, "
        f"{seconds(each)} per record in a thread of {seconds(cost)}"
    )
