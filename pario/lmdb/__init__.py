"""`import pario.lmdb as lmdb`: py-lmdb's reading API, with pread instead of a memory map.

    Environment (open) -> Transaction -> get, Cursor

env.py, txn.py and cursor.py are what users see; engine.py is compiled and does the work on cached pages; store.py holds
one snapshot of one file; hybrid.py makes `import lmdb` mean this module for reading (`install()`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pario.lmdb import errors as _errors
from pario.lmdb.errors import *  # noqa: F403

#: The release of py-lmdb whose API this is.
__version__ = "3.0.0"

#: public name -> module that defines it
_HOMES = {
    "Environment": "pario.lmdb.env",
    "open": "pario.lmdb.env",
    "version": "pario.lmdb.env",
    "Transaction": "pario.lmdb.txn",
    "Cursor": "pario.lmdb.cursor",
    "_Database": "pario.lmdb.database",
    "install": "pario.lmdb.hybrid",
}

if TYPE_CHECKING:
    from pario.lmdb.cursor import Cursor
    from pario.lmdb.database import _Database
    from pario.lmdb.env import Environment, version
    from pario.lmdb.hybrid import install
    from pario.lmdb.txn import Transaction

    open = Environment

__all__ = [
    "Cursor", "Environment", "Transaction", "_Database", "enable_drop_gil", "install", "open", "version",
    *_errors.__all__,
]  # fmt: skip


if not TYPE_CHECKING:  # a name that is not there is a mistake

    def __getattr__(name: str) -> Any:
        # Numba is loaded when the first environment is opened, not when a script imports us.
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(home), "Environment" if name == "open" else name)
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def enable_drop_gil() -> None:
    """Without effect: reads that wait for the storage release the interpreter's lock anyway."""
