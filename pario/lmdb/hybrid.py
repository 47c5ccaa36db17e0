"""`import lmdb` means pario for reading: `install()` and what `python -m pario run` does.

The real module stays in place; its `open`, `Environment`, `Transaction` and `Cursor` are replaced by names that choose:
an environment opened with readonly=True is ours, any other theirs. So modules that imported lmdb before are served too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from pario.lmdb.cursor import Cursor
from pario.lmdb.env import Environment
from pario.lmdb.real import real
from pario.lmdb.txn import Transaction

#: Place of `readonly` among the arguments of Environment.
_READONLY = 3


class _Choice(type):
    """A name that stands for two classes: calling it makes an object of one, isinstance() knows both.

    at, named : the argument that decides; picks(argument) : whether it is for ours
    """

    ours: type
    theirs: type
    at: int
    named: str
    picks: Callable[[Any], bool]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        given = args[cls.at] if len(args) > cls.at else kwargs.get(cls.named)
        return (cls.ours if cls.picks(given) else cls.theirs)(*args, **kwargs)

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, (cls.ours, cls.theirs))

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, (cls.ours, cls.theirs))


def install() -> None:
    """From now on, `lmdb.open(path, readonly=True)` opens with pario in this process and in those that it starts by
    multiprocessing (fork, spawn and forkserver: the workers of a PyTorch DataLoader among them). Environments for
    writing go to the real lmdb; without it, `import lmdb` finds pario.lmdb. Repeating it has no effect.
    """
    if real is None:
        sys.modules.setdefault("lmdb", sys.modules["pario.lmdb"])
    elif not isinstance(real.Environment, _Choice):
        _replace(real)
    _tell_children()


def _replace(module: ModuleType) -> None:
    choices: list[tuple[type, int, str, Callable[[Any], bool]]] = [
        (Environment, _READONLY, "readonly", bool),
        (Transaction, 0, "env", lambda env: isinstance(env, Environment)),
        (Cursor, 1, "txn", lambda txn: isinstance(txn, Transaction)),
    ]
    for ours, at, named, picks in choices:
        name = ours.__name__
        made = {"ours": ours, "theirs": getattr(module, name), "__doc__": ours.__doc__}
        setattr(module, name, _Choice(name, (), {**made, "at": at, "named": named, "picks": staticmethod(picks)}))
    vars(module)["open"] = module.Environment


class _Installed:
    """Unpickling it installs: the first thing that a spawned process does with what its parent sends."""

    def __reduce__(self) -> Any:
        return (install, ())


@cache
def _tell_children() -> None:
    """Processes that multiprocessing spawns are sent it from now on."""
    from multiprocessing import spawn

    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**prepare(name), "pario": _Installed()}

    spawn.get_preparation_data = get_preparation_data
