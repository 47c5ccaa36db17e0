"""The `--decoder` of the commands: one of pario by its name, or one of the user's, and what it makes of records."""

from __future__ import annotations

import copy
import importlib
import os
import runpy
import sys
from typing import Any

import numpy as np

from pario.commands.dataset import Item
from pario.decode.base import Decoder, Draw, extent
from pario.decode.given import as_decoder
from pario.decode.presets import PRESETS, preset
from pario.decode.registry import WRAPPERS, find
from pario.errors import DecodeError, OptionError
from pario.records import Records

#: Presets whose records are pickles.
_PICKLED = ("oc20", "tape", "unimol", "unimol+")


def find_decoder(text: str, **options: Any) -> Decoder:
    """The decoder that the user names: "json", "zlib+json", "ase", "module:function" or "file.py:function".

    options : of a decoder of pario; pickles are read as plain data
    Raises OptionError, or what the user's module raises.
    """
    module, colon, name = text.rpartition(":")
    if not colon:
        if text in _PICKLED or "pickle" in text.split("+"):
            options = {"allow": [], **options}  # plain data: nobody says on a command line that a file may run code
        return preset(text, **options) if text in PRESETS else as_decoder(named(text, **options))
    if not module or not name:
        raise OptionError(f"--decoder takes a name, module:function or file.py:function, got {text!r}")
    if module.endswith(".py"):
        if not os.path.isfile(module):
            raise OptionError(f"--decoder {text}: there is no file {module}")
        found: Any = runpy.run_path(module)
        if name not in found:
            raise OptionError(f"--decoder {text}: {module} has no {name}")
        return as_decoder(found[name])
    here = os.getcwd()
    sys.path.insert(0, here)  # as `python -m` does, and the script `pario` does not
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise OptionError(f"--decoder {text}: {error}", hint="It is looked for where Python runs.") from error
    except AttributeError as error:
        raise OptionError(f"--decoder {text}: {error}") from error
    finally:
        if here in sys.path:  # the module may have changed it
            sys.path.remove(here)
    return as_decoder(found)


def named(name: str, /, *inner: Any, **options: Any) -> Any:
    """The decoder of this name in the registry, constructed; "zlib+json" is Zlib(Json()). Raises OptionError.

    inner : of a wrapper, the decoder inside
    options : of the innermost decoder
    """
    first, plus, rest = name.partition("+")
    entry = find(first)
    if plus:
        if first not in WRAPPERS:
            raise OptionError(f"{first} has no decoder inside, got {name!r}; {', '.join(WRAPPERS)} have one")
        return named(first, named(rest, *inner, **options))
    make = getattr(importlib.import_module("pario.decode"), entry.cls)  # which knows the modules
    try:
        return make(*inner, **options)
    except TypeError as error:
        raise OptionError(f"{entry.cls}() needs arguments that a name cannot give: {error}") from error


def decoded(decoder: Decoder, items: list[Item]) -> list[str]:
    """What the decoder makes of each record, in a few words. It learns from the first one that it can read."""
    keys = {item.id: item.key for item in items}
    draw = Draw(keys=lambda ids: [keys[i] for i in ids.tolist()])
    mine: Decoder | None = None
    said = []
    for item in items:
        value = np.frombuffer(item.value, np.uint8)
        ids, start, nbytes = np.array([item.id]), np.zeros(1, np.int64), np.array([len(value)])
        records = Records(ids, value, start, nbytes)
        try:
            if mine is None or mine.is_open:
                learner = copy.copy(mine or decoder)
                learner.learn_at(value, item.id, draw)
                mine = learner
            out = {name: np.empty(shape, dtype) for name, (shape, dtype) in mine.shapes(records).items()}
            failures = mine.decode(records, out, draw)
            said.append(failures[0][1] if failures else _words(mine.finish(out)))
        except DecodeError as error:
            said.append(error.what)
    return [one if len(one) <= 300 else f"{one[:300]} ..." for one in said]


def _words(arrays: dict[str, np.ndarray]) -> str:
    return ", ".join(f"{name}: {_row(array)}" for name, array in arrays.items())


def _row(array: np.ndarray) -> str:
    """The first row: a number as it is, an array by dtype and shape, an object by its beginning."""
    if not len(array) or (array.dtype != object and array.ndim != 1):
        return extent(array.shape[1:], array.dtype)
    row = array[0]
    if isinstance(row, np.ndarray):
        return extent(row.shape, row.dtype)
    if array.dtype != object and len(array) > 1:
        return extent(array.shape, array.dtype)
    text = repr(row.item() if isinstance(row, np.generic) else row)
    return text if len(text) <= 60 else f"{text[:60]} ..."
