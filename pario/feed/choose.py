"""Chooses the way of each epoch; no other module does.

    seat   each rank decodes its records where they are: in the node's memory tier, or, on a file of this node, wherever
           the page cache or the disk has what the tier has not
    ring   one rank of the node prefetches groups of records into memory that its ranks share: what a shared store holds
           and the node's memory has no room for, and the first epoch without an index
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
    if reader.recipe.source == "ring" or not reader.index.is_complete:
        return Way.RING
    if stage is not None and not stage.local:
        return Way.SEAT if stage.fits_memory(reader.index, reader.checked) else Way.RING
    return Way.SEAT if reader.file.is_local else Way.RING
