"""Handles of databases."""

from __future__ import annotations

import weakref
from typing import Any

from pario.format.layout import MDB_DUPFIXED, MDB_DUPSORT, MDB_INTEGERDUP, MDB_INTEGERKEY, MDB_REVERSEKEY


class _Database:
    """A database by its name, valid in every transaction of its environment. Made by `Environment.open_db`."""

    __slots__ = ("__weakref__", "_env", "_flags", "_name")

    def __init__(self, env: Any, name: bytes | None, flags: int) -> None:
        self._env = weakref.ref(env)
        self._name = name
        self._flags = flags

    def flags(self, *args: object) -> dict[str, bool]:
        """The flags with which it was created, as arguments of `open_db`."""
        if len(args) > 1:
            raise TypeError("flags takes 0 or 1 arguments")
        return {
            "reverse_key": bool(self._flags & MDB_REVERSEKEY),
            "dupsort": bool(self._flags & MDB_DUPSORT),
            "integerkey": bool(self._flags & MDB_INTEGERKEY),
            "integerdup": bool(self._flags & MDB_INTEGERDUP),
            "dupfixed": bool(self._flags & MDB_DUPFIXED),
        }

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle '_Database' object: open it again from the environment")

    def __repr__(self) -> str:
        return f"<_Database {'main' if self._name is None else repr(self._name)}>"
