"""The same samples in DLIO's fastest format and as an LMDB, laid out as DLIO expects its files.

Sample i is a square image of random bytes whose first eight are i, little-endian. DLIO has no format for LMDBs and
takes the files whose names end with the format's: the LMDB is called x.npz.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["files_of", "make", "number_of", "sample"]

SEED = 17


def sample(i: int, side: int) -> np.ndarray:
    """u8[side, side]"""
    data = np.frombuffer(bytearray(np.random.Generator(np.random.SFC64([SEED, i])).bytes(side * side)), np.uint8)
    data[:8] = np.frombuffer(struct.pack("<q", i), np.uint8)
    return data.reshape(side, side)


def number_of(image: np.ndarray) -> int:
    return int(struct.unpack("<q", image.reshape(-1)[:8].tobytes())[0])


def make(folder: Path, samples: int, side: int) -> None:
    """Write FOLDER/<format>/train/...; what is complete is kept."""
    for name, write in _WRITERS.items():
        note, wanted = folder / f"{name}.json", {"samples": samples, "side": side}
        if note.exists() and json.loads(note.read_text()) == wanted:
            continue
        shutil.rmtree(folder / name, ignore_errors=True)
        train = folder / name / "train"
        train.mkdir(parents=True)
        (folder / name / "valid").mkdir()  # DLIO looks into it, whatever it is to do
        write(train, samples, side)
        note.write_text(json.dumps(wanted))


def files_of(folder: Path, name: str) -> list[Path]:
    return sorted(path for path in (folder / name / "train").iterdir() if path.is_file())


def _lmdb(train: Path, samples: int, side: int) -> None:
    import lmdb

    room = 2 * samples * (side * side + 8192) + (64 << 20)
    path = str(train / "img_0_of_1.npz")
    with lmdb.open(path, subdir=False, map_size=room, sync=False, metasync=False, lock=False) as env:
        for first in range(0, samples, 1000):
            with env.begin(write=True) as txn:
                for i in range(first, min(first + 1000, samples)):
                    txn.put(b"%08d" % i, sample(i, side).tobytes())
        env.sync(True)


def _indexed(train: Path, samples: int, side: int) -> None:
    path = train / "img_0_of_1.indexed_binary"
    with path.open("wb") as file:
        for i in range(samples):
            file.write(sample(i, side).tobytes())
    (train / f"{path.name}.off.idx").write_bytes((np.arange(samples, dtype=np.int64) * side * side).tobytes())
    (train / f"{path.name}.sz.idx").write_bytes(np.full(samples, side * side, np.int64).tobytes())


_WRITERS: dict[str, Any] = {"lmdb": _lmdb, "indexed_binary": _indexed}
