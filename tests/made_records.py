"""Records in memory, for decoder tests: values with gaps between them, in any order."""

from __future__ import annotations

import numpy as np

from pario.records import Records


def made(values: list[bytes], *, ids: list[int] | None = None, gap: int = 5) -> Records:
    """Records whose values lie in reverse order in the buffer, as after a coalesced read of a shuffled batch."""
    n = len(values)
    starts = np.zeros(n, np.int64)
    buffer = bytearray(b"\xee" * gap)
    for i in reversed(range(n)):
        starts[i] = len(buffer)
        buffer += values[i] + b"\xee" * gap
    data = np.frombuffer(bytes(buffer), np.uint8)
    assert not data.flags.writeable
    nbytes = np.array([len(value) for value in values], np.int64)
    return Records(np.arange(n) if ids is None else np.array(ids, np.int64), data, starts, nbytes)


def rows(records: Records, start: int, stop: int) -> Records:
    """Records start..stop of `records`, as the loader hands them to one of its threads."""
    return Records(
        records.ids[start:stop], records.data, records.starts[start:stop], records.nbytes[start:stop]
    )


def arrays(decoder, records: Records, fill: int = 0x5A) -> dict[str, np.ndarray]:
    """What the decoder asks for, every byte set to `fill`."""
    out = {name: np.empty(shape, dtype) for name, (shape, dtype) in decoder.shapes(records).items()}
    for array in out.values():
        if array.dtype.hasobject:
            array.fill(fill)
        else:
            array.reshape(-1).view(np.uint8)[:] = fill
    return out
