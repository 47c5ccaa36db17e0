"""The real `lmdb` where it is installed, else None. Found before `install()` puts ours in its place."""

from __future__ import annotations

from types import ModuleType


def _find() -> ModuleType | None:
    # Importing it costs a millisecond; exceptions must be subclasses of its classes from the start, since `except`
    # looks at real bases only.
    try:
        import lmdb
    except ImportError:
        return None
    return lmdb


real = _find()
