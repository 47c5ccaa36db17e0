"""Whether a cold file is read whole, from its beginning to its end, or record by record: decided with numbers alone.

In random order each record costs a request of its own, while a sweep over the file makes long requests and brings bytes
that nobody may want. What both take follows from two figures that were measured a moment before, so the store need not
be known. The sweep fills the page cache, so its bytes must stay there until the epoch needs them.
"""

from __future__ import annotations

from typing import NamedTuple

from pario.text import counted, decimal_bytes, seconds

__all__ = ["Choice", "Figures", "choose"]


class Figures(NamedTuple):
    """What is known when an epoch, or the rest of one, begins on a node.

    file_bytes : of the file
    records : that the node's ranks still need
    record_s : mean seconds of one of them, read at random, with several in flight
    byte_s : mean seconds of a byte of long reads all over the file, with as many in flight
    room_bytes : memory that the page cache may take
    """

    file_bytes: int
    records: int
    record_s: float
    byte_s: float
    room_bytes: int


class Choice(NamedTuple):
    """sweep : read the whole file; reason : why, or why not"""

    sweep: bool
    reason: str


def choose(found: Figures) -> Choice:
    """Sweep if that takes less time than the single records, and if memory has room for the whole file."""
    if found.file_bytes > found.room_bytes:
        return Choice(
            False,
            f"{decimal_bytes(found.file_bytes)} do not fit beside the batches: the page cache may take "
            f"{decimal_bytes(max(0, found.room_bytes))}",
        )
    sweep, single = found.file_bytes * found.byte_s, found.records * found.record_s
    records = counted(found.records, "record")
    words = f"from beginning to end it takes {seconds(sweep)}, {records} at random {seconds(single)}"
    return Choice(sweep < single, words)
