"""Finding C libraries: where, which version, and what happens without; the system's own libraries as second choice."""

from __future__ import annotations

import ctypes
import functools
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pario.codec import brotli, deflate, lz4, zstd
from pario.codec.library import Contexts, Library, open_library
from pario.codec.packing import Packing
from pario.codec.registry import make
from pario.kernels.coded import KIND, PYTHON

SYSTEM = {
    "zstd": (zstd, "libzstd.so.1"), "lz4": (lz4, "liblz4.so.1"), "lz4hc": (lz4, "liblz4.so.1"),
    "deflate": (deflate, "libdeflate.so.0"), "brotli": (brotli, "libbrotlidec.so.1"),
}  # fmt: skip


def version(library: Library) -> tuple[int, int, int]:
    number: int = library.function("ZSTD_versionNumber", ctypes.c_uint)()
    return number // 10000, number // 100 % 100, number % 100


def test_the_first_that_fits_is_taken(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_text("no library")
    names = ("ZSTD_versionNumber",)
    found = open_library(
        ("no_such_package._c", "numpy", "libnothing.so.9", str(tmp_path / "broken.so"), "zstandard._cffi"),
        names, version, (1, 0, 0),
    )  # fmt: skip
    assert found is not None
    assert "zstandard" in found.path
    assert found.version >= (1, 5, 0)
    assert found.address("ZSTD_versionNumber") > 0
    with pytest.raises(AttributeError):
        found.address("ZSTD_noSuchFunction")
    assert open_library(("zstandard._cffi",), names, version, (9, 0, 0)) is None
    assert open_library(("zstandard._cffi",), (*names, "ZSTD_noSuchFunction"), version, (1, 0, 0)) is None
    assert open_library((), names, version, (1, 0, 0)) is None


def test_a_library_beside_a_package() -> None:
    found = open_library(("blosc2/lib/libblosc2.so",), ("ZSTD_versionNumber",), version, (1, 0, 0))
    assert found is not None
    assert found.path.endswith("blosc2/lib/libblosc2.so")


def test_contexts_are_used_again_and_freed() -> None:
    freed: list[int] = []
    made = iter(range(1, 9))
    contexts = Contexts(lambda: next(made), freed.append)
    one, two = contexts.take(), contexts.take()
    contexts.give(one)
    assert (one, two, contexts.take()) == (1, 2, 1)
    contexts.give(one)
    contexts.give(two)
    del contexts
    assert sorted(freed) == [1, 2]
    with pytest.raises(MemoryError):
        Contexts(lambda: 0, freed.append).take()


@pytest.mark.parametrize("name", SYSTEM)
def test_libraries_of_the_system(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones than the wheels have; what one wrote, the other reads."""
    module, soname = SYSTEM[name]
    new = make(name)
    opened = open_library
    only = types.FunctionType(module._library.__wrapped__.__code__, {**vars(module), "open_library": None})  # type: ignore[attr-defined]

    def from_system(candidates: Any, *rest: Any) -> Library | None:
        assert soname in candidates
        return opened((soname,), *rest)

    only.__globals__["open_library"] = from_system
    found = only()
    if found is None:
        pytest.skip(f"no {soname} on this machine")
    monkeypatch.setattr(module, "_library", functools.cache(lambda: found))
    dictionary = b"one two three four five " * 30 if new.takes_dictionary else None
    old = make(name, None, dictionary)
    assert old._library is found  # type: ignore[attr-defined]
    monkeypatch.undo()
    new = make(name, None, dictionary)
    with old.decoding() as how:
        assert how[KIND] != PYTHON
    value = b"one two three four five six " * 200
    for packer, reader in ((old, new), (new, old), (old, old)):
        out = np.empty(len(value), np.uint8)
        reader.decode_into(packer.encode(value), out)
        assert out.tobytes() == value
        assert Packing([reader]).unpack_one(Packing([packer]).pack(value)) == value
