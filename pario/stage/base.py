"""The contract of tiers: copies of some chunks of one data file, nearer than the store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from pario.stage.grid import Grid

__all__ = ["Counts", "Tier"]


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


class Tier(ABC):
    """Chunks of one data file. Any thread; several processes may use one tier at the same time.

    A tier may refuse, lose and drop chunks at any time, and says so by its return values: no method raises for what
    the storage below does.

    grid : of the data file
    counts : what this process has done with it
    """

    grid: Grid
    counts: Counts

    @abstractmethod
    def held(self) -> np.ndarray:
        """bool[chunks]: which chunks are here."""

    @abstractmethod
    def put(self, chunk: int, data: np.ndarray) -> bool:
        """Keep a chunk. False: there is no room, somebody else is putting it, or the storage refuses.

        data : u8[bytes of the chunk], right for certain: nobody compares it with the store any more
        Raises IndexError for a chunk that does not exist, ValueError if `data` has another size.
        """

    @abstractmethod
    def read(self, offset: int, out: np.ndarray) -> bool:
        """Fill `out` with the file's bytes from `offset` on. False: not all of them are here; `out` is then undefined.

        out : u8[n], contiguous, inside the file. Raises IndexError otherwise.
        """

    @abstractmethod
    def close(self) -> None:
        """Idempotent. Chunks stay where others may use them. Later calls of `put` and `read` return False."""
