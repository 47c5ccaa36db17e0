"""The codecs by name: one line each. The command line and error messages read it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from pario.codec.base import Codec
from pario.errors import OptionError


class Entry(NamedTuple):
    """name : on the command line and in packed databases; cls : the class, in the module of `_MODULES`"""

    name: str
    cls: str


CODECS = (
    Entry("raw", "Raw"),
    Entry("lz4", "Lz4"),
    Entry("lz4hc", "Lz4hc"),
    Entry("zstd", "Zstd"),
    Entry("blosc2", "Blosc2"),
    Entry("deflate", "Deflate"),
    Entry("brotli", "Brotli"),
    Entry("lzma", "Lzma"),
)

_MODULES = {
    "raw": "pario.codec.raw",
    "lz4": "pario.codec.lz4",
    "lz4hc": "pario.codec.lz4",
    "zstd": "pario.codec.zstd",
    "blosc2": "pario.codec.blosc2",
    "deflate": "pario.codec.deflate",
    "brotli": "pario.codec.brotli",
    "lzma": "pario.codec.lzma",
}


def find(name: str) -> Entry:
    """The entry of this name. Raises OptionError, with the names that exist."""
    for entry in CODECS:
        if entry.name == name:
            return entry
    raise OptionError(f"no codec is called {name!r}; there are {', '.join(entry.name for entry in CODECS)}")


def make(name: str, level: int | None = None, dictionary: bytes | None = None, **options: Any) -> Codec:
    """A codec. Raises OptionError for unknown names and options, and, with the pip command, for missing packages."""
    entry = find(name)
    made: Callable[..., Codec] = getattr(import_module(_MODULES[name]), entry.cls)
    return made(level, dictionary, **options)


def parse(text: str, dictionary: bytes | None = None) -> Codec:
    """A codec from "zstd", "zstd:19" or "blosc2:5,filter=shuffle,typesize=2": name, level, options."""
    head, *rest = text.split(",")
    name, _, level = head.partition(":")
    options: dict[str, Any] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier():
            raise OptionError(f"a codec's options are name=value after a comma, got {part!r} in {text!r}")
        options[key] = int(value) if value.lstrip("-").isdigit() else value
    try:
        number = int(level) if level else None
    except ValueError:
        raise OptionError(f"a codec's level is a whole number, got {level!r} in {text!r}") from None
    return make(name, number, dictionary, **options)
