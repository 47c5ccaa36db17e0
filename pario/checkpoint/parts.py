"""The blocks of one node's part of a checkpoint, as they were saved: read from the node's file, or from those of older
checkpoints that it uses, checked, and unpacked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np

from pario.checkpoint.manifest import Part, sum_of
from pario.checkpoint.store import Reader
from pario.codec.registry import make
from pario.comm.memory import private_bytes
from pario.errors import ChecksumError, CorruptedError, DecodeError

__all__ = ["PartReader"]


class PartReader:
    """Any thread may read. Files are opened when they are needed."""

    def __init__(self, folder: str, part: Part, take: Callable[[int], None] | None = None) -> None:
        """take : of `store.Reader`. Raises OptionError where the codec's package is missing."""
        self._folder, self.part, self._take = folder, part, take
        self._codec = make(part.codec) if part.codec else None
        self._readers: dict[int, Reader] = {}
        self._lock = threading.Lock()

    def open(self, file: int) -> Reader:
        """A file of `Part.files`. Raises MissingError, ReadError, CorruptedError."""
        with self._lock:
            if file not in self._readers:
                name, size = self.part.files[file]
                self._readers[file] = Reader(os.path.join(self._folder, name), size, take=self._take)
            return self._readers[file]

    def read(self, number: int, out: np.ndarray) -> None:
        """A block, checked, into `out`, u8[its bytes]. Raises ChecksumError, CorruptedError, ReadError and the like."""
        where = self.part.where(number)
        reader = self.open(where.file)
        if where.nbytes == out.size and not where.coded:
            reader.read(out, where.offset)
            self._check(out, self.part.sums[number], reader, where.offset)
            return
        stored = private_bytes(-(-where.nbytes // 4096) * 4096)[: where.nbytes]
        reader.read(stored, where.offset)
        self._check(stored, where.sum, reader, where.offset)
        if not where.coded:
            np.copyto(out, stored[: out.size])
        else:
            assert self._codec is not None
            try:
                self._codec.decode_into(stored[: where.coded], out)
            except DecodeError as e:
                raise CorruptedError(f"a block cannot be unpacked: {e}", path=reader.path, offset=where.offset) from e
        self._check(out, self.part.sums[number], reader, where.offset)

    def _check(self, data: np.ndarray, total: int, reader: Reader, offset: int) -> None:
        found = sum_of(data)
        if found != total:
            raise ChecksumError(
                f"the checksum of {data.size:,} bytes is {found:016x}, the manifest says {total:016x}",
                path=reader.path,
                offset=offset,
            )

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
