"""Packs LMDBs for tests with the real lmdb, and says what must come out of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from pario.codec.base import Codec
from pario.codec.packing import Packing, reserved_key
from pario.codec.registry import make
from pario.codec.zstd import train
from pario.records import Records

__all__ = ["pack_copy", "values_like_text", "write"]


def values_like_text(n: int, seed: int = 0, most: int = 400) -> list[bytes]:
    """Values of several sizes that can be compressed, an empty one and a random one among them."""
    rng = np.random.default_rng(seed)
    words = [b"alpha", b"beta", b"gamma", b"delta", b"epsilon", b"zeta"]
    values = []
    for i in range(n):
        many = int(rng.integers(1, most // 6))
        values.append(b"%d " % i + b" ".join(words[k] for k in rng.integers(0, len(words), many)))
    values[n // 2] = b""
    values[n // 3] = rng.bytes(300)
    return values


def write(path: Path, items: Sequence[tuple[bytes, bytes]], db: bytes | None = None, **flags: Any) -> Path:
    """An LMDB with these records."""
    with lmdb.open(os.fspath(path), map_size=1 << 30, max_dbs=4) as env:
        handle = env.open_db(db, **flags)
        with env.begin(write=True, db=handle) as txn:
            for key, value in items:
                txn.put(key, value)
    return path


def pack_copy(
    path: Path,
    items: Sequence[tuple[bytes, bytes]],
    codecs: Sequence[Codec] | None = None,
    *,
    db: bytes | None = None,
    dictionary: bool = False,
    reverse: bool = False,
    integer: int = 0,
    more: dict[str, Any] | None = None,
    counts: Sequence[int] = (),
) -> Path:
    """The same records packed, as docs/packing.md says; `items` are in the order of the database.

    counts : how many records each entry has, over and over; (): one
    """
    if codecs is None:
        codecs = [make("zstd", 3, train([value for _, value in items], 4096) if dictionary else b"")]
    packing = Packing(codecs, more=more)
    packed = [(key, packing.pack(value)) for key, value in items]
    if counts and items:
        ends = np.cumsum(np.resize(counts, len(items)))
        packing.counts = np.diff(np.append(ends[ends < len(items)], len(items)), prepend=0)
        records = Records.of(np.arange(len(items)), [value for _, value in items])
        keys, data, nbytes = packing.pack_entries(records, [key for key, _ in items], packing.counts)
        stops = np.cumsum(nbytes)
        packed = [(key, data[b - n : b].tobytes()) for key, b, n in zip(keys, stops, nbytes, strict=True)]
    packing.sizes = np.array([len(value) for _, value in items])
    last = items[-1][0] if items else None
    # Reversed, keys of numbers are bytes like others.
    packed.append((reserved_key(last, integer=0 if reverse else integer, reverse=reverse), packing.entry()))
    flags = {name: True for name, on in (("reverse_key", reverse), ("integerkey", integer)) if on}
    return write(path, packed, db, **flags)
