"""Tars read by pario as they are, against WebDataset over the same tars: samples per second, shuffled, on one rank.

pario shuffles all samples exactly; WebDataset takes the tars in random order, and shuffles in a buffer of 1,000
samples. Warm: the tars are in the page cache. Slow store: FUSE, 20 ms a read, 200 MB/s in all, no page cache. Both
sides copy the bytes of a batch into one array; the runs of both take turns, each in a process of its own.

    python -m benchmarks.tar_direct --folder /tmp/tars --rounds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stores.latency import latency_store

SHARDS, BATCH, BAR = 8, 256, 1.5


def make(folder: Path, samples: int, nbytes: int) -> None:
    """8 tars of samples of two members: pixels and a label. Written once."""
    import webdataset

    if folder.exists():
        return
    folder.mkdir(parents=True)
    values = np.random.default_rng(0).integers(0, 256, (64, nbytes), np.uint8)
    for k in range(SHARDS):
        with webdataset.TarWriter(str(folder / f"{k:03d}.tar")) as writer:
            for i in range(samples * k // SHARDS, samples * (k + 1) // SHARDS):
                writer.write({"__key__": f"{i:08d}", "bin": values[i % 64].tobytes(), "cls": str(i % 10).encode()})


def pario_epochs(folder: str, nbytes: int, epochs: int) -> Iterator[tuple[float, int]]:
    import pario

    fields = {"bin": ("{}.bin", pario.decode.Raw(np.uint8, (nbytes,))), "cls": ("{}.cls", pario.decode.Text())}
    path = f"{folder}/{{000..{SHARDS - 1:03d}}}.tar"
    with pario.Loader(path, BATCH, shuffle="global", fields=fields) as loader:
        for _ in range(epochs):
            begin = time.perf_counter()
            count = sum(len(batch["bin"]) for batch in loader)
            yield time.perf_counter() - begin, count


def webdataset_epochs(folder: str, nbytes: int, epochs: int) -> Iterator[tuple[float, int]]:
    import webdataset

    def collate(samples: list[dict[str, Any]]) -> tuple[np.ndarray, list[str]]:
        pixels = np.frombuffer(b"".join(one["bin"] for one in samples), np.uint8).reshape(-1, nbytes)
        return pixels, [one["cls"].decode() for one in samples]

    paths = [f"{folder}/{k:03d}.tar" for k in range(SHARDS)]
    for epoch in range(epochs):
        begin = time.perf_counter()
        data = webdataset.WebDataset(paths, shardshuffle=SHARDS, seed=epoch, empty_check=False)
        batches = data.shuffle(1000, seed=epoch).batched(BATCH, collation_fn=collate, partial=True)
        count = sum(len(pixels) for pixels, _ in batches)
        yield time.perf_counter() - begin, count


SIDES = {"pario": pario_epochs, "webdataset": webdataset_epochs}


def rates(side: str, folder: str, nbytes: int, epochs: int) -> list[float]:
    """Samples per second of each epoch, in a process of its own."""
    line = [sys.executable, "-m", "benchmarks.tar_direct", "--side", side, "--folder", folder]
    more = ["--bytes", str(nbytes), "--epochs", str(epochs)]
    found: list[float] = json.loads(subprocess.run([*line, *more], check=True, stdout=subprocess.PIPE).stdout)
    return found


def compare(folder: Path, samples: int, nbytes: int, rounds: int, *, slow: bool) -> None:
    make(folder, samples, nbytes)
    epochs = 1 if slow else 3
    rates("pario", str(folder), nbytes, 1)  # saves the indexes, and compiles
    store = latency_store(folder, read_s=0.020, bytes_per_s=200_000_000) if slow else nullcontext()
    found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    with store as mounted:
        where = str(folder) if mounted is None else mounted.folder
        for _ in range(rounds):
            for side, mine in found.items():
                mine.append(rates(side, where, nbytes, epochs))
    kind = f"{'slow store' if slow else 'warm'}, {samples:,} samples of {nbytes:,} bytes"
    for first, name in ((True, "first epoch"), (False, "later epochs")):  # out of memory, where pario has it by then
        each = {side: [statistics.median(one[:1] if first else one[1:]) for one in mine] for side, mine in found.items()
                if first or epochs > 1}  # fmt: skip
        if not each:
            continue
        ratios = [a / b for a, b in zip(*each.values(), strict=True)]
        ratio = statistics.median(ratios)
        said = ", ".join(f"{side} {statistics.median(mine):,.0f}/s" for side, mine in each.items())
        span = f"{min(ratios):.2f} ... {max(ratios):.2f}"
        print(f"{kind}, {name}: {said}: {ratio:.2f} x ({span}), {'met' if ratio >= BAR else 'MISSED'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1)
    given = parser.parse_args()
    if given.side:
        epochs = SIDES[given.side](given.folder, given.bytes, given.epochs)
        print(json.dumps([count / seconds for seconds, count in epochs]))
        return
    folder = Path(given.folder)
    compare(folder / "3k", 20_000, 3072, given.rounds, slow=False)
    compare(folder / "150k", 6_000, 150_528, given.rounds, slow=False)
    compare(folder / "150k-slow", 200, 150_528, 1, slow=True)


if __name__ == "__main__":
    main()
