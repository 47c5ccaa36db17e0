"""`import lmdb` means pario for reading: `install()` and what `python -m pario run` does.

The real module stays in place; its `open`, `Environment`, `Transaction` and `Cursor` are replaced by names that choose:
an environment opened with readonly=True is ours, any other theirs. So modules that imported lmdb before are served too.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from pario.lmdb.cursor import Cursor
from pario.lmdb.env import Environment
from pario.lmdb.real import real
from pario.lmdb.served import tell_children
from pario.lmdb.txn import Transaction

#: Place of `readonly` among the arguments of Environment.
_READONLY = 3


class _Choice(type):
    """A name that stands for two classes: calling it makes an object of one, isinstance() knows both."""

    ours: type
    theirs: type

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, (cls.ours, cls.theirs))

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, (cls.ours, cls.theirs))


class _EnvironmentChoice(_Choice):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        readonly = kwargs.get("readonly", args[_READONLY] if len(args) > _READONLY else False)
        return (cls.ours if readonly else cls.theirs)(*args, **kwargs)


class _TransactionChoice(_Choice):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        env = args[0] if args else kwargs.get("env")
        return (cls.ours if isinstance(env, Environment) else cls.theirs)(*args, **kwargs)


class _CursorChoice(_Choice):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        txn = args[1] if len(args) > 1 else kwargs.get("txn")
        return (cls.ours if isinstance(txn, Transaction) else cls.theirs)(*args, **kwargs)


def install() -> None:
    """From now on, `lmdb.open(path, readonly=True)` opens with pario in this process and in those that it starts by
    multiprocessing (fork, spawn and forkserver: the workers of a PyTorch DataLoader among them). Environments for
    writing go to the real lmdb; without it, `import lmdb` finds pario.lmdb. Repeating it has no effect.
    """
    if real is None:
        sys.modules.setdefault("lmdb", sys.modules["pario.lmdb"])
    elif not isinstance(real.Environment, _Choice):
        _replace(real)
    tell_children("installed", _Installed)


def _replace(module: ModuleType) -> None:
    choices: list[tuple[str, type[_Choice], type]] = [
        ("Environment", _EnvironmentChoice, Environment),
        ("Transaction", _TransactionChoice, Transaction),
        ("Cursor", _CursorChoice, Cursor),
    ]
    for name, choice, ours in choices:
        theirs = getattr(module, name)
        setattr(module, name, choice(name, (), {"ours": ours, "theirs": theirs, "__doc__": ours.__doc__}))
    vars(module)["open"] = module.Environment


class _Installed:
    """Unpickling it installs: the first thing that a spawned process does with what its parent sends."""

    def __reduce__(self) -> Any:
        return (install, ())
