"""Whether a cold file is read whole, from its beginning to its end, or record by record: decided with numbers alone.

In random order each record costs a request of its own, while a sweep over the file makes long requests and brings bytes
that nobody may want. What both take follows from two figures that were measured a moment before, so the store need not
be known. The sweep fills the page cache, so its bytes must stay there until the epoch needs them.
"""

from __future__ import annotations

from typing import NamedTuple

from pario.text import counted, decimal_bytes, seconds

__all__ = ["Choice", "Figures", "choose", "no_room"]


class Figures(NamedTuple):
    """What is known when an epoch, or the rest of one, begins on a node.

    file_bytes : of the file
    records : that the node's ranks still need
    record_s : mean seconds of one of them, read at random, with several in flight
    byte_s : mean seconds of a byte of long reads all over the file, with as many in flight
    """

    file_bytes: int
    records: int
    record_s: float
    byte_s: float


class Choice(NamedTuple):
    """sweep : read the whole file; reason : why, or why not"""

    sweep: bool
    reason: str


def no_room(file_bytes: int, room_bytes: int) -> Choice | None:
    """The choice that needs no measurement: not to sweep a file that is larger than the memory that the page cache may
    take. None: there is room."""
    if file_bytes <= room_bytes:
        return None
    return Choice(
        False,
        f"{decimal_bytes(file_bytes)} do not fit beside the batches: the page cache may take "
        f"{decimal_bytes(max(0, room_bytes))}",
    )


def choose(found: Figures) -> Choice:
    """Sweep a file for which memory has room, if that takes less than half the time of the single records: the loop
    goes on reading its records meanwhile, and the two share the disk. (DLIO without computing, 7,680 records of 147 KB
    on two ranks, foretold at 0.53 s against 0.96 s: a step took 19.3 ms with the sweep and 16.2 ms without it.)"""
    sweep, single = found.file_bytes * found.byte_s, found.records * found.record_s
    records = counted(found.records, "record")
    words = f"from beginning to end it takes {seconds(sweep)}, {records} at random {seconds(single)}"
    return Choice(2 * sweep < single, words)
