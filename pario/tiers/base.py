"""The contract of tiers: copies of some chunks of one data file, nearer than the store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pario.tiers.grid import Grid
from pario.wire.frames import Part


@dataclass
class Counts:
    """What a tier of this process has done.

    puts, put_bytes : chunks taken
    refused : chunks not taken for want of room
    reads, read_bytes : calls of `read` that the tier answered
    damaged : chunks found to be not what was put, and dropped
    errors : system calls that failed
    """

    puts: int = 0
    put_bytes: int = 0
    refused: int = 0
    reads: int = 0
    read_bytes: int = 0
    damaged: int = 0
    errors: int = 0


class AnyTier(ABC):
    """Chunks of one data file. Any thread; several processes may use one tier at the same time.

    A tier may refuse, lose and drop chunks at any time, and says so by its return values: no method raises for what
    the storage below does.

    name : for the user, as in "memory" or the folder
    grid : of the data file
    counts : what this process has done with it
    asks : another process brings its chunks, and asks the store for them
    near : its reads are copies out of memory
    """

    name: str
    asks = near = False
    grid: Grid
    counts: Counts

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """True if the tier would refuse another chunk, as far as this process knows. No system call."""

    @abstractmethod
    def held(self) -> np.ndarray:
        """bool[chunks]: which chunks are here."""

    @abstractmethod
    def has(self, chunk: int) -> bool:
        """Whether a chunk is here."""

    @abstractmethod
    def put(self, chunk: int, data: np.ndarray) -> bool:
        """Keep a chunk. False: there is no room, somebody else is putting it, or the storage refuses.

        data : u8[bytes of the chunk], right for certain: nobody compares it with the store any more
        Raises IndexError for a chunk that does not exist, ValueError if `data` has another size.
        """

    def ask(self, chunk: int) -> bool:
        """Of one that `asks`: let another process bring the chunk; returns whether it is here then."""
        return False

    def announce(self, filling: bool) -> None:
        """By the process that fills it: whether chunks are on their way, so that waiting for them has a point."""
        return

    @contextmanager
    def bringing(self, chunk: int) -> Iterator[None]:
        """`with tier.bringing(chunk):` while this process brings a chunk here. Others that share the tier and want to
        bring it wait at the beginning for a while, and then find it. One thread of a process at a time; another one may
        end it."""
        yield

    @abstractmethod
    def read(self, offset: int, out: np.ndarray) -> bool:
        """Fill `out` with the file's bytes from `offset` on. False: not all of them are here; `out` is then undefined.

        out : u8[n], contiguous, inside the file. Raises IndexError otherwise.
        """

    def read_many(self, extents: np.ndarray, out: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """bool[n]: which of these extents are here; they were written to `out[starts[i]:]`, others left undefined.

        extents : EXTENT[n] inside the file, each within one chunk; out : u8[k], contiguous; starts : i64[n]
        """
        columns = zip(extents["offset"].tolist(), extents["nbytes"].tolist(), starts.tolist(), strict=True)
        return np.fromiter((self.read(offset, out[at : at + n]) for offset, n, at in columns), bool, len(extents))

    def lend(self, offset: int, nbytes: int) -> Part | None:
        """The file's bytes for another process; None: not all of them are here. `Part.still` tells whether they are
        still there. Arguments as for `read`."""
        out = np.empty(nbytes, np.uint8)
        return Part(out) if self.read(offset, out) else None

    def room(self) -> int:
        """How many chunks it can hold, those included that are here."""
        return self.grid.chunks

    @abstractmethod
    def close(self) -> None:
        """Idempotent. Chunks on a disk stay for others. Later calls of `put` and `read` return False."""
