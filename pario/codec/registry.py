"""The codecs by name: one line each. The command line and error messages read it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from pario.codec.base import Codec
from pario.errors import OptionError

#: name, on the command line and in packed databases -> module of its class, which has this name capitalized
CODECS = {
    "raw": "pario.codec.raw",
    "lz4": "pario.codec.lz4",
    "lz4hc": "pario.codec.lz4",
    "zstd": "pario.codec.zstd",
    "blosc2": "pario.codec.blosc2",
    "deflate": "pario.codec.deflate",
    "brotli": "pario.codec.brotli",
    "lzma": "pario.codec.lzma",
}


def make(name: str, level: int | None = None, dictionary: bytes | None = None, **options: Any) -> Codec:
    """A codec. Raises OptionError for unknown names and options, and, with the pip command, for missing packages."""
    if name not in CODECS:
        raise OptionError(f"no codec is called {name!r}; there are {', '.join(CODECS)}")
    made: Callable[..., Codec] = getattr(import_module(CODECS[name]), name.capitalize())
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
