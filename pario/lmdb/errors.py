"""The exceptions of `pario.lmdb`: py-lmdb's names and codes.

    Error (lmdb.Error)
    ├── KeyExistsError, NotFoundError, PageNotFoundError, CorruptedError, PanicError, VersionMismatchError,
    │   InvalidError, MapFullError, DbsFullError, ReadersFullError, TlsFullError, TxnFullError, CursorFullError,
    │   PageFullError, MapResizedError, IncompatibleError, BadRslotError, BadTxnError, BadValsizeError, BadDbiError,
    │   ProblemError, BadChecksumError, CryptoFailError, EnvEncryptionError
    └── ReadonlyError, InvalidParameterError, LockError, MemoryError, DiskError

Where the real `lmdb` is installed, every class is a subclass of the one of the same name there, so that
`except lmdb.NotFoundError` catches ours too. Every exception pickles, and carries the place of damage as attributes:
`path`, `page`, `offset` (None where unknown) and `hint`.
"""

from __future__ import annotations

import builtins
import errno
from typing import Any

from pario.errors import CorruptedError as PageError
from pario.errors import EncryptedError, OptionError, ParioError, SnapshotError
from pario.errors import InvalidError as FileInvalidError
from pario.errors import VersionMismatchError as FormatError
from pario.lmdb.real import real

#: What `pario.lmdb` shows, too.
__all__ = [
    "BadChecksumError", "BadDbiError", "BadRslotError", "BadTxnError", "BadValsizeError", "CorruptedError",
    "CryptoFailError", "CursorFullError", "DbsFullError", "DiskError", "EnvEncryptionError", "Error",
    "IncompatibleError", "InvalidError", "InvalidParameterError", "KeyExistsError", "LockError", "MapFullError",
    "MapResizedError", "MemoryError", "NotFoundError", "PageFullError", "PageNotFoundError", "PanicError",
    "ProblemError", "ReadersFullError", "ReadonlyError", "TlsFullError", "TxnFullError", "VersionMismatchError",
]  # fmt: skip


class Error(getattr(real, "Error", Exception)):  # type: ignore[misc]
    """Raised when an LMDB operation fails and there is no more specific class.

    what : what happened; code : LMDB's number (0: none); reason : the name of that number
    """

    code: int = 0
    reason: str = ""

    def __init__(
        self,
        what: object = "",
        code: int | None = None,
        *,
        path: str | None = None,
        page: int | None = None,
        offset: int | None = None,
        hint: str | None = None,
    ) -> None:
        Exception.__init__(self, what)
        self.what = what
        if code is not None:
            self.code = code
        self.path = path
        self.page = page
        self.offset = offset
        self.hint = hint

    def __str__(self) -> str:
        places = ("path", "page", "offset")
        where = ", ".join(f"{name} {getattr(self, name)!r}" for name in places if getattr(self, name) is not None)
        text = f"{self.what}" + (f": {self.reason}" if self.reason and self.code else "")
        return text + (f" [{where}]" if where else "") + (f". {self.hint}" if self.hint else "")


def _define(name: str, code: int, reason: str, doc: str) -> type[Error]:
    theirs = getattr(real, name, None)
    bases = (Error,) if theirs is None else (Error, theirs)
    return type(name, bases, {"__doc__": doc, "__module__": __name__, "code": code, "reason": reason})


KeyExistsError = _define("KeyExistsError", -30799, "MDB_KEYEXIST", "The key exists already.")
NotFoundError = _define("NotFoundError", -30798, "MDB_NOTFOUND", "There is no such key or database.")
PageNotFoundError = _define("PageNotFoundError", -30797, "MDB_PAGE_NOTFOUND", "A page is not in the file.")
CorruptedError = _define("CorruptedError", -30796, "MDB_CORRUPTED", "A page breaks the rules of the format.")
PanicError = _define("PanicError", -30795, "MDB_PANIC", "A fatal error in the past.")
VersionMismatchError = _define("VersionMismatchError", -30794, "MDB_VERSION_MISMATCH", "An unknown data format.")
InvalidError = _define("InvalidError", -30793, "MDB_INVALID", "Not an LMDB file.")
MapFullError = _define("MapFullError", -30792, "MDB_MAP_FULL", "The map is full (writers only).")
DbsFullError = _define("DbsFullError", -30791, "MDB_DBS_FULL", "More databases than max_dbs.")
ReadersFullError = _define("ReadersFullError", -30790, "MDB_READERS_FULL", "No reader slot is free (never here).")
TlsFullError = _define("TlsFullError", -30789, "MDB_TLS_FULL", "No thread-local storage (never raised here).")
TxnFullError = _define("TxnFullError", -30788, "MDB_TXN_FULL", "A transaction has too many pages (writers only).")
CursorFullError = _define("CursorFullError", -30787, "MDB_CURSOR_FULL", "A tree is too deep.")
PageFullError = _define("PageFullError", -30786, "MDB_PAGE_FULL", "A page is full (writers only).")
MapResizedError = _define("MapResizedError", -30785, "MDB_MAP_RESIZED", "The file outgrew the map (never raised here).")
IncompatibleError = _define("IncompatibleError", -30784, "MDB_INCOMPATIBLE", "The database does not allow this.")
BadRslotError = _define("BadRslotError", -30783, "MDB_BAD_RSLOT", "A reader slot was misused (never raised here).")
BadTxnError = _define("BadTxnError", -30782, "MDB_BAD_TXN", "The transaction cannot go on.")
BadValsizeError = _define("BadValsizeError", -30781, "MDB_BAD_VALSIZE", "A key or value of this size is not allowed.")
BadDbiError = _define("BadDbiError", -30780, "MDB_BAD_DBI", "The database handle is not valid.")
ReadonlyError = _define("ReadonlyError", errno.EACCES, "Permission denied", "pario.lmdb only reads.")
InvalidParameterError = _define("InvalidParameterError", errno.EINVAL, "Invalid argument", "A wrong argument.")
LockError = _define("LockError", errno.EAGAIN, "Resource temporarily unavailable", "Locked (never raised here).")
MemoryError = _define("MemoryError", errno.ENOMEM, "Cannot allocate memory", "Out of memory.")
DiskError = _define("DiskError", errno.ENOSPC, "No space left on device", "No more disk space (copies only).")
ProblemError = _define("ProblemError", -30779, "MDB_PROBLEM", "An unexpected problem.")
BadChecksumError = _define("BadChecksumError", -30778, "MDB_BAD_CHECKSUM", "A page's checksum is wrong.")
CryptoFailError = _define("CryptoFailError", -30777, "MDB_CRYPTO_FAIL", "A page cannot be decrypted.")
EnvEncryptionError = _define("EnvEncryptionError", -30776, "MDB_ENV_ENCRYPTION", "The file is encrypted.")

#: What to do instead of writing.
_WRITE_HINT = "pario.lmdb only reads: use the real lmdb to write (`import lmdb`), and pario.lmdb to read what it wrote"


def closed() -> Error:
    return Error("Attempt to operate on closed/deleted/dropped object.")


def readonly(what: str) -> Error:
    return ReadonlyError(what, hint=_WRITE_HINT)


def refusing(what: str, known: str) -> Any:
    """A method that would write, and raises ReadonlyError. what, known : py-lmdb's name, and those of its arguments, of
    which it lets any be missing"""
    names = known.split()

    def refuse(self: Any, *given: object, **named: object) -> Any:
        """Raises ReadonlyError."""
        if len(given) > len(names) or not named.keys() <= {*names[len(given) :]}:
            raise TypeError(f"{what}() takes {', '.join(names)}, each once")
        self._check()
        raise readonly(what)

    refuse.__name__, refuse.__qualname__ = what, what
    return refuse


def translated(error: ParioError, what: str) -> Error:
    """An error of the rooms below as the class that py-lmdb's users expect, with its place."""
    kinds: list[tuple[type[ParioError], type[Error]]] = [
        (FormatError, VersionMismatchError),
        (EncryptedError, EnvEncryptionError),
        (FileInvalidError, InvalidError),
        (PageError, CorruptedError),
        (SnapshotError, BadTxnError),
        (OptionError, InvalidParameterError),
    ]
    cls = next((ours for theirs, ours in kinds if isinstance(error, theirs)), Error)
    result = cls(f"{what}: {error.what}", path=error.path, page=error.page, offset=error.offset, hint=error.hint)
    if isinstance(error, builtins.OSError) and cls is Error:
        result.code = error.errno or 0
    return result
