"""pario: collective MPI readers that feed a training loop from one LMDB on shared storage.

Names are loaded on first use: `import pario` starts no MPI and compiles nothing.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

__all__ = [
    "Batch", "Budget", "CheckpointError", "Checkpointer", "ChecksumError", "ClosedError", "CorruptedError",
    "DatabaseError", "DeadRankError", "DecodeError", "EmptyError", "EncryptedError", "FileError", "HeldBatchesError",
    "InvalidError", "LauncherError", "Loader", "MissingError", "OptionError", "Options", "ParioError", "PeerError",
    "PerRank", "RankError", "ReadError", "Reader", "Records", "Report", "Shard", "SnapshotError", "StateError", "Tier",
    "VersionMismatchError", "__version__", "decode", "errors", "split",
]  # fmt: skip

#: public name -> module that defines it
_HOMES = {
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "pario.errors"),
    "Batch": "pario.records",
    "Budget": "pario.plan.budget",
    "Checkpointer": "pario.checkpoint.checkpointer",
    "Loader": "pario.loader.loader",
    "Options": "pario.options",
    "PerRank": "pario.checkpoint.tree",
    "Reader": "pario.dataset.reader",
    "Records": "pario.records",
    "Report": "pario.stats.report",
    "Shard": "pario.checkpoint.tree",
    "Tier": "pario.options",
    "decode": "pario.decode",
    "errors": "pario.errors",
    "split": "pario.dataset.split",
}

if TYPE_CHECKING:
    from pario import decode, errors
    from pario.checkpoint.checkpointer import Checkpointer
    from pario.checkpoint.tree import PerRank, Shard
    from pario.dataset.reader import Reader
    from pario.dataset.split import split
    from pario.errors import (
        CheckpointError,
        ChecksumError,
        ClosedError,
        CorruptedError,
        DatabaseError,
        DeadRankError,
        DecodeError,
        EmptyError,
        EncryptedError,
        FileError,
        HeldBatchesError,
        InvalidError,
        LauncherError,
        MissingError,
        OptionError,
        ParioError,
        PeerError,
        RankError,
        ReadError,
        SnapshotError,
        StateError,
        VersionMismatchError,
    )
    from pario.loader.loader import Loader
    from pario.options import Options, Tier
    from pario.plan.budget import Budget
    from pario.records import Batch, Records
    from pario.stats.report import Report


if not TYPE_CHECKING:  # a name that is not there is a mistake

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'pario' has no attribute {name!r}")
        # Modules make objects that stay; a search for garbage among them takes an eighth of the time to import them.
        collects = gc.isenabled()
        gc.disable()
        try:
            module = importlib.import_module(home)
        finally:
            if collects:
                gc.enable()
        value = module if home == f"pario.{name}" else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
