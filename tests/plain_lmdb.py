"""pario.lmdb as plain Python for good, as if nothing were ever compiled. As a plugin (`pytest -p plain_lmdb`): in the
whole session, and in what its tests fork."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from pario.lmdb import cursor, env, native, store, txn


class Never:
    """In place of `compiling.Compiling`."""

    done = False

    def look(self, all_cached: Callable[[], bool]) -> bool:
        return False


def use_plain_python(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(native, "_compiling", Never())
    patch.setattr(txn.Transaction, "get", txn._first_get)
    modules: tuple[ModuleType, ...] = (cursor, env, store, txn)
    for name in (*native._FUNCTIONS, "fill"):
        (module,) = (one for one in modules if hasattr(one, f"_{name}"))
        patch.setattr(module, f"_{name}", native.later(name, vars(module), f"_{name}"))


def pytest_configure(config: Any) -> None:
    config.stash[_PATCH] = patch = pytest.MonkeyPatch()
    use_plain_python(patch)


def pytest_unconfigure(config: Any) -> None:
    config.stash[_PATCH].undo()


_PATCH = pytest.StashKey[pytest.MonkeyPatch]()
