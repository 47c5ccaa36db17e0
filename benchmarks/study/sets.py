"""The data sets of the study and of benchmarks/: Caffe Datum records of 3 KB and 197 KB, and records of varying sizes.

Their layout is that of Caffe's converter. Each set is a folder DIR/<name>/ with data.mdb and set.json, which describes
it and is written last, so its presence means "complete". A complete set with the same parameters is reused, an
incomplete one is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import lmdb
import numpy as np

__all__ = ["SETS", "SMALL", "DataSet", "Held", "Shape", "content", "datum_parts", "held", "make", "record_digest"]

PAGE = 4096
PAGE_HEADER = 16  # bytes before a value on overflow pages


@dataclass(frozen=True)
class Shape:
    """Parameters of one set; sizes in bytes, the image as (channels, height, width)."""

    name: str
    records: int
    image: tuple[int, int, int]
    commit_every: int = 1000  # Caffe's convert_imageset commits every 1,000 records
    seed: int = 20190601


@dataclass(frozen=True)
class DataSet:
    """A complete set on disk. `head` + image + `tail` bytes make one value; the image starts at `head`."""

    path: str  # folder that holds data.mdb
    name: str
    records: int
    image: tuple[int, int, int]
    head: int
    value_bytes: int
    page_size: int
    record_pages: int  # pages with values: the least that an epoch must read
    tree_pages: int  # branch and leaf pages: the least that an exact index must read
    file_bytes: int

    @property
    def file(self) -> str:
        return os.path.join(self.path, "data.mdb")

    @property
    def record_bytes(self) -> int:
        """Bytes of the records' pages: the unit of all throughput and redundancy figures."""
        return self.record_pages * self.page_size

    @property
    def image_bytes(self) -> int:
        return int(np.prod(self.image))

    def at(self, folder: str) -> DataSet:
        """The same set, copied to another folder."""
        return DataSet(**{**asdict(self), "path": folder})


SETS = {
    "3k": Shape("datum-3k", 400_000, (3, 32, 32)),
    "197k": Shape("datum-197k", 10_000, (3, 256, 256)),
}
#: Values of 100 bytes, which lie in leaf pages; for single sections only.
SMALL = {"100b": Shape("datum-100b", 1_000_000, (3, 5, 6))}


def varint(value: int) -> bytes:
    """Protocol buffers' base-128 integer."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def datum_parts(image: tuple[int, int, int], label: int) -> tuple[bytes, bytes]:
    """Bytes before and after the pixels of a Caffe Datum: fields 1-3 (shape), the head of 4 (data); field 5 (label)."""
    c, h, w = image
    head = b"\x08" + varint(c) + b"\x10" + varint(h) + b"\x18" + varint(w) + b"\x22" + varint(c * h * w)
    return head, b"\x28" + varint(label)


def label_of(record: int) -> int:
    return record * 7 % 100  # below 128: one byte, so that all values have the same size


def content(shape: Shape, block: int, count: int) -> np.ndarray:
    """u8[count, pixels]: the pixels of records block*commit_every ..., from a stream of its own per block."""
    pixels = int(np.prod(shape.image))
    rng = np.random.Generator(np.random.SFC64([shape.seed, block]))
    return np.frombuffer(rng.bytes(count * pixels), np.uint8).reshape(count, pixels)


def record_digest(data: bytes | memoryview | np.ndarray, label: int) -> int:
    """A 64-bit hash of what a decoded record delivers."""
    digest = hashlib.blake2b(data, digest_size=8)
    digest.update(int(label).to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little")


def make(
    folder: str | Path, which: str, records: int | None = None, say: Callable[[str], None] = lambda _: None
) -> DataSet:
    """Write one of `SETS` or `SMALL` below `folder`, or return the existing one.

    records : fewer (or more) records than the frozen workload; the folder's name then contains the number
    say : called with a message when writing a set starts, which takes a while
    """
    shape = (SETS | SMALL)[which]
    if records is not None and records != shape.records:
        shape = Shape(f"{shape.name}-{records}", records, shape.image, shape.commit_every, shape.seed)
    path = Path(folder) / shape.name
    note = path / "set.json"
    wanted = asdict(shape) | {"image": list(shape.image)}
    if note.exists():
        held = json.loads(note.read_text())
        if held["shape"] == wanted and os.path.getsize(path / "data.mdb") == held["set"]["file_bytes"]:
            held["set"]["image"] = tuple(held["set"]["image"])
            return DataSet(**{**held["set"], "path": str(path)})
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    head, tail = datum_parts(shape.image, 0)
    value_bytes = len(head) + int(np.prod(shape.image)) + len(tail)
    value_pages = -(-(PAGE_HEADER + value_bytes) // PAGE)
    need = shape.records * value_pages * PAGE
    say(f"making {path}: {shape.records} records of {value_bytes} bytes, {need / 1e9:.2f} GB")
    env = lmdb.open(str(path), map_size=2 * need + (64 << 20), sync=False, metasync=False, lock=False)
    values = np.empty((shape.commit_every, value_bytes), np.uint8)
    values[:, : len(head)] = np.frombuffer(head, np.uint8)
    values[:, -2] = tail[0]
    for block, start in enumerate(range(0, shape.records, shape.commit_every)):
        count = min(shape.commit_every, shape.records - start)
        values[:count, len(head) : -2] = content(shape, block, count)
        values[:count, -1] = [label_of(i) for i in range(start, start + count)]
        with env.begin(write=True) as txn:
            for i in range(count):
                txn.put(b"%08d" % (start + i), values[i])
    env.sync(True)
    stat, page_size = env.stat(), env.stat()["psize"]
    env.close()
    size = os.path.getsize(path / "data.mdb")
    (path / "lock.mdb").unlink(missing_ok=True)
    made = DataSet(
        path=str(path),
        name=shape.name,
        records=shape.records,
        image=shape.image,
        head=len(head),
        value_bytes=value_bytes,
        page_size=page_size,
        record_pages=stat["overflow_pages"] or stat["leaf_pages"],
        tree_pages=stat["branch_pages"] + stat["leaf_pages"],
        file_bytes=size,
    )
    note.write_text(json.dumps({"shape": wanted, "set": asdict(made) | {"path": ""}}, indent=1))
    return made


# -- of the study -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A set as the study uses it: its folder, the size of one epoch, and how to read it.

    page_bytes : bytes of all pages with values: the least that a store must deliver for one epoch
    decoder : "datum" or "raw" (bytes and offsets)
    head, pixels : bytes of a Datum's value before its pixels, and of the pixels
    step_records : records of one step, all ranks together
    """

    which: str
    folder: str
    records: int
    value_bytes: int
    page_bytes: int
    file_bytes: int
    decoder: str
    head: int
    pixels: int
    step_records: int

    @property
    def file(self) -> str:
        return os.path.join(self.folder, "data.mdb")

    def digests(self) -> np.ndarray:
        """u64[records]: hashes of what py-lmdb reads for each record, in key order."""
        found = np.empty(self.records, np.uint64)
        with lmdb.open(self.folder, readonly=True, lock=False) as env, env.begin(buffers=True) as txn:
            for i, value in enumerate(txn.cursor().iternext(keys=False)):
                if self.decoder == "datum":
                    found[i] = record_digest(value[self.head : self.head + self.pixels], value[-1])
                else:
                    found[i] = record_digest(value, 0)
        return found


#: set -> records of one step: 2 to 6 MB
STEPS = {"3k": 512, "197k": 32, "variable": 128}


def held(folder: str | Path, which: str, records: int, say: Callable[[str], None] = lambda _: None) -> Held:
    """One of the sets of `STEPS` with this many records; written below `folder` if missing."""
    if which == "variable":
        return _variable(Path(folder), records, say)
    made = make(folder, which, records, say)
    return Held(
        which=which,
        folder=made.path,
        records=made.records,
        value_bytes=made.records * made.value_bytes,
        page_bytes=made.record_bytes,
        file_bytes=made.file_bytes,
        decoder="datum",
        head=made.head,
        pixels=made.image_bytes,
        step_records=STEPS[which],
    )


def _variable(folder: Path, records: int, say: Callable[[str], None]) -> Held:
    """Values of 200 bytes to 400 KB (log-normal, median 12 KB): small ones lie inside leaf pages, and neighbours may
    differ in size by more than a hundred times."""
    path = folder / f"variable-{records}"
    note = path / "set.json"
    if note.exists() and (path / "data.mdb").exists():
        facts = json.loads(note.read_text())
        if facts["file_bytes"] == os.path.getsize(path / "data.mdb"):
            return Held(**{**facts, "folder": str(path)})
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    rng = np.random.Generator(np.random.SFC64([20190601, records]))
    sizes = np.clip(rng.lognormal(np.log(12_000), 1.2, records), 200, 400_000).astype(np.int64)
    say(f"making {path}: {records} records of {sizes.min()} to {sizes.max()} bytes, {sizes.sum() / 1e9:.2f} GB")
    env = lmdb.open(str(path), map_size=2 * int(sizes.sum()) + (256 << 20), sync=False, metasync=False, lock=False)
    for start in range(0, records, 1000):
        with env.begin(write=True) as txn:
            for i in range(start, min(start + 1000, records)):
                txn.put(b"%08d" % i, rng.bytes(int(sizes[i])))
    env.sync(True)
    stat = env.stat()
    env.close()
    (path / "lock.mdb").unlink(missing_ok=True)
    made = Held(
        which="variable",
        folder="",
        records=records,
        value_bytes=int(sizes.sum()),
        page_bytes=(stat["overflow_pages"] + stat["leaf_pages"]) * stat["psize"],
        file_bytes=os.path.getsize(path / "data.mdb"),
        decoder="raw",
        head=0,
        pixels=0,
        step_records=STEPS["variable"],
    )
    note.write_text(json.dumps(asdict(made), indent=1))
    return Held(**{**asdict(made), "folder": str(path)})
