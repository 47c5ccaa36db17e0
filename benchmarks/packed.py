"""The Loader on packed databases beside the codec alone, and beside the same records unpacked.

    python -m benchmarks.packed --data DIR [--rounds 7] [--only SECTION] [--codec zstd:3] [--out F]

Sections: `bare`, records/s of the Loader on 3 KB and 197 KB records in memory over those of the codec's own
`decode_many` on as many threads (bar 0.9), and beside the unpacked set; `store`, over those of the unpacked set on a
store of 20 ms and 200 MB/s, at ratio 2 (bar 1.8); `files`, records of 1.2 KB as files of 4 KiB blocks over the LMDB
that `pack` makes of their folder (bar 5). Sets are made in DIR: Caffe's Datum with pixels of four bits of
entropy, which zstd halves. Rounds are interleaved, figures are medians of ratios. Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lmdb
import numpy as np

import pario
from benchmarks.codecs import kinds
from benchmarks.measure import interleave, ratios
from benchmarks.stores.latency import latency_store
from benchmarks.study.sets import varint
from pario.codec.packing import Packing, reserved_key
from pario.codec.registry import parse
from pario.comm.solo import Solo
from pario.decode import Datum
from pario.packing.pack import PackOptions, Talk
from pario.packing.pack import pack as pack_sources
from pario.records import Records

#: name -> (records, pixels as channels, height, width)
SETS = {"3k": (100_000, (3, 32, 32)), "197k": (2_000, (3, 256, 256))}
#: Spread of the pixels' values, for a packed file of half the size. (Raw records of 3 KB have a page of LMDB each.)
SPREAD = {"3k": 4.0, "197k": 2.8}
BATCH = {"3k": 512, "197k": 32}
BARS = {"bare": 0.9, "store": 1.8, "files": 5.0}
STORE = {"read_s": 0.020, "metadata_s": 0.002, "bytes_per_s": 200_000_000}
_THREADS = len(os.sched_getaffinity(0))


def values_of(which: str) -> list[bytes]:
    """Datum messages; of one size."""
    n, (c, h, w) = SETS[which]
    rng = np.random.default_rng(1)
    head = b"\x08" + varint(c) + b"\x10" + varint(h) + b"\x18" + varint(w) + b"\x22" + varint(c * h * w)
    pixels = np.clip(rng.normal(128, SPREAD[which], (n, c * h * w)), 0, 255).astype(np.uint8)
    return [head + row.tobytes() + b"\x28" + varint(128 + i % 1000) for i, row in enumerate(pixels)]


def made(folder: Path, which: str, codec: str) -> tuple[Path, Path]:
    """(the raw set, the packed one), made if they are not there."""
    raw, packed = folder / f"{which}-raw", folder / f"{which}-{codec.replace(':', '-')}"
    if raw.is_dir() and packed.is_dir():
        return raw, packed
    items = [(b"%08d" % i, value) for i, value in enumerate(values_of(which))]
    write(raw, items)
    pack(packed, items, codec)
    return raw, packed


def pack(path: Path, items: list[tuple[bytes, bytes]], codec: str) -> None:
    packing = Packing([parse(codec)])
    packing.sizes = np.array([len(value) for _, value in items])
    packed = [(key, packing.pack(value)) for key, value in items]
    write(path, [*packed, (reserved_key(items[-1][0]), packing.entry())])


def write(path: Path, items: list[tuple[bytes, bytes]]) -> None:
    size = 2 * sum(len(value) + 4096 for _, value in items) + (16 << 20)
    with lmdb.open(os.fspath(path), map_size=size) as env, env.begin(write=True) as txn:
        for key, value in items:
            txn.put(key, value, append=True)
    with pario.Reader(os.fspath(path), comm="self"):
        pass  # saves the index


# -- the codec alone ---------------------------------------------------------------------------------------------------


def bare_rate(packed: Path, threads: int) -> Callable[[], float]:
    """Records/s of `decode_many` on so many threads, from memory into memory that is used again."""
    with pario.Reader(os.fspath(packed), comm="self") as reader:
        stored, packing = reader.read_stored(range(len(reader))), reader.packing
    assert packing is not None
    raw = packing.raw_nbytes(stored)
    codec, lead = packing.codecs[0], 5 + len(varint(int(raw[0])))
    values = Records(stored.ids, stored.data, stored.starts + lead, stored.nbytes - lead)
    per = max(1, (256 << 10) // int(raw[0]))

    def work(first: int, stop: int) -> None:
        out = np.empty(per * int(raw[0]), np.uint8)
        starts = np.arange(per) * int(raw[0])
        for at in range(first, stop, per):
            end = min(at + per, stop)
            failed = codec.decode_many(values.part(at, end), out, starts[: end - at], raw[at:end])
            assert not failed

    def rate() -> float:
        n = len(values)
        cuts = [n * k // threads for k in range(threads + 1)]
        workers = [threading.Thread(target=work, args=cut) for cut in pairwise(cuts)]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return n / (time.perf_counter() - begin)

    return rate


def loader_rate(loader: pario.Loader) -> float:
    """Records/s of an epoch."""
    n, begin = 0, time.perf_counter()
    for batch in loader:
        n += len(batch.ids)
    return n / (time.perf_counter() - begin)


def turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    interleave(sides, 1)  # compiles, and warms
    return interleave(sides, rounds)


def against(found: dict[str, list[float]], one: str, other: str) -> dict[str, float]:
    """Median, least and greatest of the ratio, round by round."""
    return {name: round(value, 3) for name, value in ratios(found[one], found[other]).items()}


def bare(folder: Path, rounds: int, codec: str) -> list[dict[str, Any]]:
    told = []
    for which in SETS:
        raw, packed = made(folder, which, codec)
        for shuffle in (False, "global"):
            threads = pario.Options(decode_threads=_THREADS)
            options: dict[str, Any] = {"comm": "self", "shuffle": shuffle, "options": threads}
            with (
                pario.Loader(os.fspath(packed), BATCH[which], Datum(), **options) as ours,
                pario.Loader(os.fspath(raw), BATCH[which], Datum(), **options) as plain,
            ):
                sides = {
                    "packed": lambda ours=ours: loader_rate(ours),
                    "raw": lambda plain=plain: loader_rate(plain),
                    "codec": bare_rate(packed, _THREADS),
                }
                found = turns(sides, rounds)
                print(ours.report(all_ranks=True), file=sys.stderr)
            told.append({
                "section": "bare", "set": which, "shuffle": shuffle, "codec": codec, "threads": _THREADS,
                "rates": {name: round(median(rates)) for name, rates in found.items()},
                "packed / codec": against(found, "packed", "codec"), "packed / raw": against(found, "packed", "raw"),
                "met": against(found, "packed", "codec")["median"] >= BARS["bare"],
            })  # fmt: skip
            print(json.dumps(told[-1]), flush=True)
    return told


# -- a slow store ------------------------------------------------------------------------------------------------------


def cold_rate(path: Path, which: str) -> float:
    with (
        latency_store(os.fspath(path), **STORE) as mounted,
        pario.Loader(mounted.folder, BATCH[which], Datum(), comm="self", save_index=False) as loader,
    ):
        return loader_rate(loader)


def store(folder: Path, rounds: int, codec: str) -> list[dict[str, Any]]:
    """Cold epochs from a store of 20 ms and 200 MB/s: a mount of its own for each set and round."""
    told = []
    for which in SETS:
        raw, packed = made(folder, which, codec)
        sizes = [os.path.getsize(path / "data.mdb") for path in (raw, packed)]
        found = interleave({"raw": partial(cold_rate, raw, which), "packed": partial(cold_rate, packed, which)}, rounds)
        told.append({
            "section": "store", "set": which, "codec": codec, "file bytes raw / packed": round(sizes[0] / sizes[1], 2),
            "rates": {name: round(median(rates)) for name, rates in found.items()},
            "packed / raw": against(found, "packed", "raw"),
            "met": against(found, "packed", "raw")["median"] >= BARS["store"],
        })  # fmt: skip
        print(json.dumps(told[-1]), flush=True)
    return told


# -- small files -------------------------------------------------------------------------------------------------------


def files(folder: Path, rounds: int, codec: str) -> list[dict[str, Any]]:
    """A folder of small files, packed."""
    source, target = folder / "files", folder / "files.lmdb"
    values = kinds()["int16 1.2 KB"]
    for i, value in enumerate(values):
        path = source / f"{i // 1000:03d}" / f"{i:06d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
    with Solo() as world:
        silent = Talk(lambda text: None, lambda *_: lambda done: None)
        pack_sources(world, [os.fspath(source)], os.fspath(target), PackOptions(codec=codec, force=True), silent)
    blocks, stored = sum(-(-len(value) // 4096) * 4096 for value in values), os.path.getsize(target)
    told = {
        "section": "files", "codec": codec, "records": len(values), "raw": sum(map(len, values)), "blocks": blocks,
        "file": stored, "raw / file": round(sum(map(len, values)) / stored, 2),
        "blocks / file": round(blocks / stored, 2), "met": blocks / stored >= BARS["files"],
    }  # fmt: skip
    print(json.dumps(told), flush=True)
    return [told]


SECTIONS = {"bare": bare, "store": store, "files": files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=sorted(SECTIONS))
    parser.add_argument("--codec", default="zstd:3")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.data.mkdir(parents=True, exist_ok=True)
    told = []
    for name, section in SECTIONS.items():
        if given.only in (None, name):
            told += section(given.data, given.rounds, given.codec)
    if given.out:
        given.out.write_text(json.dumps(told, indent=1))
    return 0 if all(one["met"] for one in told) else 1


if __name__ == "__main__":
    sys.exit(main())
