"""The table of decoders, and what a record looks like."""

from __future__ import annotations

import gzip
import importlib.util
import io
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest

import pario.decode
from pario.commands.decoder import named
from pario.decode import Json, Raw, Zlib
from pario.decode.registry import DECODERS, WRAPPERS, describe, find
from pario.errors import OptionError

#: name -> the package that it needs
NEEDS = {"msgpack": "msgpack", "zstd": "zstandard", "pickle": "", "struct": ""}


def test_the_registry_is_what_the_package_shows() -> None:
    classes = [entry.cls for entry in DECODERS]
    others = {"Decoder", "Draw", "Function", "Kernel", "as_decoder", "kernel", "preset"}
    assert set(pario.decode.__all__) - set(classes) == others
    for entry in DECODERS:
        assert getattr(pario.decode, entry.cls).__name__ == entry.cls


def test_the_documentation_knows_every_decoder() -> None:
    page = (Path(__file__).parent.parent / "docs" / "decoders.md").read_text()
    for entry in DECODERS:
        assert f"pario.decode.{entry.cls}(" in page, f"{entry.cls} is missing in docs/decoders.md"


def test_named() -> None:
    for entry in DECODERS:
        need = NEEDS.get(entry.name)
        if need is None or (need and importlib.util.find_spec(need)):
            assert type(named(entry.name)).__name__ == entry.cls
    inner = named("zlib+json")
    assert isinstance(inner, Zlib)
    assert isinstance(inner.inner, Json)
    assert repr(named("gzip+zlib+raw", dtype="u1")) == "Gzip(Zlib(Raw(dtype='uint8')))"
    assert isinstance(named("raw"), Raw)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("jpeg", "no decoder is called 'jpeg'; there are raw, datum"),
        ("json+zlib", "json has no decoder inside"),
        ("struct", r"Struct\(\) needs arguments that a name cannot give"),
        ("pickle", "has to be told how far to trust the file"),
        ("", "no decoder is called ''"),
    ],
)
def test_names_that_do_not_work(name, why) -> None:
    with pytest.raises(OptionError, match=why):
        named(name)


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.zeros(2))
    return file.getvalue()


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (b"\xff\xd8\xff\xe0", "image"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image"),
        (npz(), "npz"),
        (b"\x93NUMPY\1\0", "npy"),
        (b'{"a": 1}', "json"),
        (b'  [1]', "json"),
        (zlib.compress(b"abc"), "zlib"),
        (zlib.compress(b"abc", 9), "zlib"),
        (gzip.compress(b"abc", mtime=0), "gzip"),
        (b"\x28\xb5\x2f\xfd....", "zstd"),
        *((pickle.dumps({"a": 1}, protocol), "pickle") for protocol in (2, 3, 4, 5)),
    ],
)
def test_what_a_record_looks_like(record, name) -> None:
    said, advice = describe(np.frombuffer(record, np.uint8))
    assert advice == find(name).advice
    assert said.startswith(f"it begins with {record[:4].hex(' ')}, ")


def test_nothing_known() -> None:
    assert describe(np.frombuffer(b"\0\1\2\3", np.uint8)) == ("it begins with 00 01 02 03", "")
    assert describe(np.empty(0, np.uint8)) == ("it is empty", "")
    assert set(WRAPPERS) < {entry.name for entry in DECODERS}
