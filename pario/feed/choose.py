"""Chooses the way of each epoch; no other module does.

    seat   each rank decodes its records where they are: in the node's memory tier, or, on a file of this node, wherever
           the page cache or the disk has what the tier has not
    ring   one rank of the node prefetches groups of records into memory that its ranks share: what the node's memory
           has no room for, and the first epoch without an index

Where there is no room, each rank might read a file of the node by itself, too. (Without a tier on 1, 2 and 4 ranks of
two cores, the ring ÷ that: cold, 100 bytes 1.5 to 9 times as fast, 3 KB 1.3 to 7, 197 KB 1.1 to 3; out of the page
cache 100 bytes 0.8 to 7, 3 KB 0.4 to 1.7, 197 KB 0.5 to 0.95. In "block" order it gains most.)
"""

from __future__ import annotations

import enum

from pario.dataset.reader import Reader


class Way(str, enum.Enum):
    """How the ranks of a node get their records."""

    RING = "ring"
    SEAT = "seat"
    #: first the tiers must be opened anew; the largest word, so that it wins
    RENEW = "tiers"


def choose(reader: Reader) -> Way:
    """The way of the next epoch for the ranks of this node; on its first rank."""
    stage = reader.stage
    if stage is not None and stage.is_lost() and not reader.is_staged:
        return Way.RENEW
    if stage is None or reader.recipe.source == "ring" or not reader.index.is_complete:
        return Way.RING
    return Way.SEAT if stage.fits_memory(reader.index, reader.checked) else Way.RING
