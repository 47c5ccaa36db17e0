"""Tars of every kind, written by Python's tarfile, and what tarfile then reads of them."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

#: name -> (tarfile's format, members)
SIZES = (0, 1, 511, 512, 513, 4000, 70_000)
LONG = "deep/" * 40


#: of extractall: Python 3.11.4 and later, which warn without it
SAFE = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def content(name: str, nbytes: int) -> bytes:
    return np.random.default_rng(list(name.encode())).bytes(nbytes)


def write_tar(path: Path | str, members: Iterable[tuple[str, bytes]], **how: object) -> str:
    """A tar of these files (name, content), in this order. how : of tarfile.open"""
    with tarfile.open(path, "w", **how) as tar:  # type: ignore[call-overload]
        for name, value in members:
            info = tarfile.TarInfo(name)
            info.size = len(value)
            tar.addfile(info, io.BytesIO(value))
    return os.fspath(path)


def truth(path: str | Path) -> list[tuple[bytes, bytes]]:
    """(name, content) of its files in the order of the names, as tarfile tells; of a name the last one counts."""
    found = {}
    with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape") as tar:
        for member in tar:
            if member.isreg():
                opened = tar.extractfile(member)
                assert opened is not None
                found[member.name.encode("utf-8", "surrogateescape").removeprefix(b"./")] = opened.read()
    return sorted(found.items())


def odd_members() -> list[tuple[str, bytes]]:
    names = ["a.bin", "./b.bin", "dir/c.x.y", "ünïcode/ß.bin", "no-extension", LONG + "name.bin", "z" * 101]
    named = zip(names, SIZES, strict=True)
    return [*((name, content(name, nbytes)) for name, nbytes in named), *((f"{i}.n", bytes(i)) for i in range(40))]


def samples(first: int, stop: int, kinds: tuple[str, ...] = ("jpg", "cls")) -> list[tuple[str, bytes]]:
    """As WebDataset writes them: the members of a sample follow each other."""
    found = []
    for i in range(first, stop):
        for kind in kinds:
            value = str(i % 10).encode() if kind == "cls" else content(f"{i}", 300 + i % 50)
            found.append((f"{i:06d}.{kind}", value))
    return found


def shards(folder: Path, count: int, each: int, kinds: tuple[str, ...] = ("jpg", "cls")) -> str:
    """The pattern of `count` tars of `each` samples, in the folder, which is made."""
    folder.mkdir(parents=True)
    for k in range(count):
        write_tar(folder / f"shard-{k:03d}.tar", samples(k * each, (k + 1) * each, kinds))
    return f"{folder}/shard-{{000..{count - 1:03d}}}.tar"
