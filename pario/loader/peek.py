"""A batch to look at: the one that this rank gets next, read and decoded by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pario.decode.base import Draw
from pario.plan.stream import Work
from pario.records import Batch
from pario.supply.base import Context, Parts

__all__ = ["peek"]


def peek(context: Context, work: Work, step: int) -> Batch:
    """This rank's batch of the first step of `work`, whose number in its loop is `step`. Not collective.

    Raises ReadError, CorruptedError, SnapshotError, and DecodeError as the loop would, on this rank alone.
    """
    schedule = replace(work.schedule, pieces=1, per_group=1)
    first, stop = schedule.step_groups(0)
    shares = [context.own_records(schedule, work.order, group) for group in range(first, stop)]
    ids, steps, rows = (np.concatenate(column) for column in zip(*shares, strict=True))
    mine = steps == 0
    reader, decode = context.reader, context.decode
    records = reader.read_stored(ids[mine][np.argsort(rows[mine])], verify=False)
    arrays, filled = decode.arrays(records, len(records) // context.width)
    filled[:] = records.ids[:: context.width]
    failures = decode.decode(records, arrays, Draw(work.stream.seed, work.epoch, reader.keys))
    return decode.batch(Parts(arrays, filled, failures), step, work.epoch)
