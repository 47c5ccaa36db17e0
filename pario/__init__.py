"""pario: collective MPI readers that feed a training loop from one LMDB on shared storage.

Names are loaded on first use, so that `import pario` starts no MPI and compiles nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: public name -> module that defines it
_HOMES = {
    "Batch": "pario.records",
    "Loader": "pario.loader",
    "Options": "pario.options",
    "Reader": "pario.reader",
    "Records": "pario.records",
    "Report": "pario.stats.report",
    "decode": "pario.decode",
    "errors": "pario.errors",
    "ParioError": "pario.errors",
}

__all__ = ["Batch", "Loader", "Options", "ParioError", "Reader", "Records", "Report", "__version__", "decode", "errors"]

if TYPE_CHECKING:
    from pario import decode, errors
    from pario.errors import ParioError
    from pario.loader import Loader
    from pario.options import Options
    from pario.reader import Reader
    from pario.records import Batch, Records
    from pario.stats.report import Report


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pario' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if home == f"pario.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
