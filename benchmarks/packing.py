"""How fast `python -m pario data pack` is beside the codec alone, on as many cores.

    python -m benchmarks.packing --data DIR [--rounds 5] [--codecs zstd:3,lz4hc]

One process, as many threads as it has cores. The sources are LMDBs of made records, in the page cache. `bare` packs the
same values, which lie in memory, chunk by chunk in as many threads, and keeps nothing; it is the faster one of the C
library without the interpreter (`Packing.pack_many`) and, for zstd, the package `zstandard` with its own threads.
`pack` is everything from opening the source to the final name, without reading back, into DIR; `verified` with it. The
sides take turns, each first in every other round. A row has the middle of the ratios of a round (least ... most), of
seconds and of processor seconds: with other work on the machine only the latter say what an idle one would do. Exit
status 1 if a middle misses the bar.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import lmdb
import numpy as np

from benchmarks.measure import interleave, machine, parser_of, told
from pario.codec.packing import Packing
from pario.codec.registry import parse
from pario.comm.solo import Solo
from pario.machine import allowed_cores
from pario.packing.pack import PackOptions, Talk, pack
from pario.records import Records

BAR = 0.85
_CHUNK = 4 << 20


def _json(rng: np.random.Generator, n: int) -> bytes:
    words = rng.choice(["red", "green", "blue", "seven", "house", "river"], 40)
    return b'{"id": %d, "caption": "%s"}' % (n, " ".join(words).encode())


def _image(rng: np.random.Generator, side: int) -> bytes:
    """A smooth picture of 3 * side * side bytes, every eighth pixel of which has noise in its lowest bit."""
    waves = np.sin(np.arange(side) * rng.uniform(0.02, 0.2) + rng.uniform(0, 6, (3, side, 1)).cumsum(1) / 40)
    return (128 + 12 * waves).astype(np.uint8).__xor__((rng.random(waves.shape) < 1 / 8).view(np.uint8)).tobytes()


KINDS: dict[str, Callable[[np.random.Generator, int], bytes]] = {
    "JSON of 0.3 KB": _json,
    "pictures of 3 KB": lambda rng, n: _image(rng, 32),
    "pictures of 197 KB": lambda rng, n: _image(rng, 256),
}


def make(path: str, kind: str, nbytes: int) -> Records:
    """Write the LMDB, and return its values."""
    rng = np.random.default_rng(list(kind.encode()))
    distinct = [KINDS[kind](rng, n) for n in range(max(8, min(4000, nbytes // len(KINDS[kind](rng, 0)))))]
    count = nbytes // (sum(map(len, distinct)) // len(distinct))
    values = [distinct[n % len(distinct)] for n in range(count)]
    with lmdb.open(path, map_size=4 * nbytes + (64 << 20), sync=False) as env, env.begin(write=True) as txn:
        txn.cursor().putmulti(((b"%09d" % n, value) for n, value in enumerate(values)), append=True)
    sizes = np.array([len(value) for value in values], np.int64)
    return Records(np.arange(count), np.frombuffer(b"".join(values), np.uint8), np.cumsum(sizes) - sizes, sizes)


def _chunks(records: Records) -> list[Records]:
    ends = np.cumsum(records.nbytes)
    cuts = np.searchsorted(ends, np.arange(_CHUNK, int(ends[-1]), _CHUNK), side="right").tolist()
    return [records.part(a, b) for a, b in zip([0, *cuts], [*cuts, len(records)], strict=True) if b > a]


def timed(work: Callable[[], object]) -> np.ndarray:
    """f64[2]: seconds, and seconds of processors."""
    begin, spent = time.perf_counter(), time.process_time()
    work()
    return np.array([time.perf_counter() - begin, time.process_time() - spent])


def bare(records: Records, spec: str, threads: int) -> np.ndarray:
    """f64[2], as `timed`; of the faster way."""
    packing, chunks = Packing([parse(spec)]), _chunks(records)
    with ThreadPoolExecutor(threads) as pool:
        took = timed(lambda: list(pool.map(lambda part: len(packing.pack_many(part)[0]), chunks)))
    if spec.startswith("zstd:"):
        import zstandard

        codec = zstandard.ZstdCompressor(level=int(spec[5:]), write_content_size=False)
        views = [[memoryview(value) for value in part] for part in chunks]
        other = timed(lambda: [codec.multi_compress_to_buffer(part, threads=threads) for part in views])
        took = np.minimum(took, other)
    return took


def packed(source: str, target: str, spec: str, verify: bool) -> np.ndarray:
    """f64[2], as `timed`."""
    shutil.rmtree(target, ignore_errors=True)
    options = PackOptions(codec=spec, dictionary="no", block="no", verify=verify)
    silent = Talk(lambda text: None, lambda *_: lambda done: None)
    with Solo() as world:
        return timed(lambda: pack(world, [source], target, options, silent))


def compared(folder: str, kind: str, spec: str, nbytes: int, rounds: int) -> tuple[str, float]:
    """(the row, the middle ratio)"""
    source, target, threads = os.path.join(folder, "source"), os.path.join(folder, "packed"), len(allowed_cores())
    shutil.rmtree(source, ignore_errors=True)
    records = make(source, kind, nbytes)
    sides: dict[str, Callable[[], np.ndarray]] = {
        "bare": lambda: bare(records, spec, threads),
        "pack": lambda: packed(source, target, spec, False),
        "verified": lambda: packed(source, target, spec, True),
    }
    interleave(sides, 1)  # compiles, and fills the page cache
    found = interleave(sides, rounds)
    megabytes = records.data.nbytes / 1e6
    smaller = records.data.nbytes / os.path.getsize(os.path.join(target, "data.mdb"))
    shutil.rmtree(source)
    shutil.rmtree(target)
    rates = [f"{megabytes / median(one[0] for one in found[side]):.0f}" for side in sides]
    cells, pairs = [], {}
    for side, which in (("pack", 0), ("pack", 1), ("verified", 0)):
        pairs[side, which] = [float(a[which] / b[which]) for a, b in zip(found["bare"], found[side], strict=True)]
        cells.append(told(pairs[side, which]))
    row = f"| {kind} | {spec} | {smaller:.2f} | {' | '.join(rates)} | {' | '.join(cells)} |"
    return row, median(pairs["pack", 0])


def main() -> int:
    parser = parser_of("packing", __doc__, 5)
    parser.add_argument("--codecs", default="zstd:3,lz4hc")
    given = parser.parse_args()
    os.makedirs(given.data, exist_ok=True)
    rounds, megabytes = (1, 16) if given.smoke else (given.rounds, 256)
    facts = machine()
    print(f"{facts['cpus']} cores, {facts.get('cpu', '')}; {rounds} rounds; sources of {megabytes} MB, cached")
    print("| records | codec | raw ÷ file | bare MB/s | pack | verified | pack ÷ bare | processors | verified ÷ bare |")
    print("|---|---|---|---|---|---|---|---|---|")
    worst = 1e9
    for kind in KINDS:
        for spec in given.codecs.split(","):
            row, ratio = compared(given.data, kind, spec, megabytes * 1_000_000, rounds)
            print(row, flush=True)
            worst = min(worst, ratio)
    print(f"bar: pack ÷ bare at least {BAR}; the worst is {worst:.2f}")
    return int(worst < BAR and not given.smoke)


if __name__ == "__main__":
    sys.exit(main())
