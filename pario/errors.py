"""The errors of pario: what happened, where, and how to go on.

    ParioError
    ├── OptionError (ValueError)          an argument or option that cannot be used
    ├── FileError                         something about the dataset file
    │   ├── MissingError (FileNotFoundError)   no such path, no data.mdb in the directory
    │   ├── InvalidError                  not an LMDB data file, or one that cannot be opened as it is
    │   │   ├── VersionMismatchError      an LMDB data format that pario does not know
    │   │   └── EncryptedError            pages are ciphertext
    │   ├── CorruptedError                a page, node or extent that breaks the format's rules
    │   │   └── ChecksumError             a value that is not the one whose checksum was saved
    │   ├── SnapshotError                 a writer changed the file while it was read
    │   ├── DatabaseError                 no such named database, or databases where records were expected
    │   │   └── EmptyError                the database holds no record
    │   └── ReadError (OSError)           the storage refused or cut short a read
    ├── CheckpointError                   a checkpoint that could not be saved
    ├── DecodeError                       a record that the decoder cannot turn into arrays
    ├── StateError                        a saved state that does not fit this dataset or these options
    ├── HeldBatchesError (MemoryError)    the user keeps more batches than the budget allows
    ├── ClosedError                       use after close()
    └── RankError
        ├── LauncherError                 mpiexec and the MPI library do not belong together
        ├── PeerError                     another rank raised; names the rank and its error
        └── DeadRankError                 another rank is gone

Every error carries its place as attributes (`path`, `rank`, `page`, `offset`, `record`, `key`: None where unknown) and
survives pickling, so that it can travel between ranks.
"""

from __future__ import annotations

#: the line that installs what an extra of pario brings. No index has pario: it is for a clone
how_to_install = 'pip install ".[{}]" in a clone of pario'.format


class ParioError(Exception):
    """Base of all errors that pario raises on purpose.

    Parameters
    ----------
    what : str
        What happened, with what was expected and what was found.
    hint : str, optional
        How to go on; printed after the place.
    path, rank, page, offset, record, key : optional
        Where it happened: file, MPI rank, LMDB page number, byte offset in the file, record id, key bytes.
    """

    def __init__(
        self,
        what: str,
        *,
        hint: str | None = None,
        path: str | None = None,
        rank: int | None = None,
        page: int | None = None,
        offset: int | None = None,
        record: int | None = None,
        key: bytes | None = None,
    ) -> None:
        self.what = what
        self.hint = hint
        self.path = path
        self.rank = rank
        self.page = page
        self.offset = offset
        self.record = record
        self.key = key
        super().__init__(self._message())

    def _message(self) -> str:
        places = ("path", "rank", "page", "offset", "record", "key")
        where = ", ".join(f"{name} {getattr(self, name)!r}" for name in places if getattr(self, name) is not None)
        return self.what + (f" [{where}]" if where else "") + (f". {self.hint}" if self.hint else "")

    def __str__(self) -> str:
        # OSError and KeyError subclasses would print something else.
        return self._message()

    def at(self, **where: object) -> ParioError:
        """Fill in places that are still unknown (a page checker does not know the path); returns self."""
        for name, value in where.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.args = (self._message(),)
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(cls: type[ParioError], state: dict[str, object]) -> ParioError:
    error = cls(str(state["what"]))
    error.__dict__.update(state)
    error.args = (error._message(),)
    return error


class OptionError(ParioError, ValueError):
    """An argument or option that cannot be used; the message holds the received value."""


class FileError(ParioError):
    """Something is wrong with the dataset file."""


class MissingError(FileError, FileNotFoundError):
    """No such path, a directory without data.mdb, or no checksums where `verify=True` needs them."""


class InvalidError(FileError):
    """Not an LMDB data file, or meta pages that contradict each other."""


class VersionMismatchError(InvalidError):
    """An LMDB data format that pario does not know."""


class EncryptedError(InvalidError):
    """The pages of the file are encrypted by the application that wrote it."""


class CorruptedError(FileError):
    """A page, node or extent breaks the rules of the format."""


class ChecksumError(CorruptedError):
    """A record's value is not the one whose checksum was saved; the message holds both checksums."""


class SnapshotError(FileError):
    """A writer committed too often while we read: it may have overwritten pages of our snapshot."""


class DatabaseError(FileError):
    """A named database that does not exist, or named databases where records were expected."""


class EmptyError(DatabaseError):
    """The database holds no record."""


class ReadError(FileError, OSError):
    """The storage refused a read, or returned fewer bytes than expected."""


class CheckpointError(ParioError):
    """A checkpoint could not be saved; the ones before it are untouched."""


class DecodeError(ParioError):
    """A record that the decoder cannot turn into arrays; carries record id and key."""


class StateError(ParioError):
    """A saved state that does not fit this dataset or these options."""


class HeldBatchesError(ParioError, MemoryError):
    """The user refers to more batches than the memory budget allows."""


class ClosedError(ParioError):
    """Use of a reader or loader after close()."""


class RankError(ParioError):
    """Something between the ranks."""


class LauncherError(RankError):
    """mpiexec (or srun) and the MPI library that mpi4py loaded do not belong together."""


class PeerError(RankError):
    """Another rank raised; the message names it and repeats its error."""


class DeadRankError(RankError):
    """Another rank ended without closing."""
