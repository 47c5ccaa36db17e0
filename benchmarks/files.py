"""Records as files: what it costs to open, read and close one, and to read a large one.

    python -m benchmarks.files mount      the FUSE mount of `pario files mount`, beside files of the same bytes
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import lmdb

RECORD_BYTES, RECORDS = 128 << 10, 600
LARGE_BYTES = 256 << 20


def make(folder: Path) -> None:
    """set.lmdb, and the same bytes in plain/."""
    (folder / "plain").mkdir()
    with lmdb.open(str(folder / "set.lmdb"), map_size=2 << 30, sync=False) as env, env.begin(write=True) as txn:
        for name, nbytes in [*((f"{i:04d}", RECORD_BYTES) for i in range(RECORDS)), ("large", LARGE_BYTES)]:
            value = os.urandom(nbytes)
            txn.put(name.encode(), value)
            (folder / "plain" / name).write_bytes(value)


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    at = folder / "mount"
    at.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "pario", "files", "mount", str(folder / "set.lmdb"), str(at)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield at
    finally:
        process.terminate()
        process.wait(20)


def opens_us(folder: Path) -> list[float]:
    """Microseconds of open + read + close, per record; each record is read once."""
    took = []
    for i in range(RECORDS):
        path = f"{folder}/{i:04d}"
        begin = time.perf_counter()
        fd = os.open(path, os.O_RDONLY)
        data = os.read(fd, RECORD_BYTES)
        os.close(fd)
        took.append(1e6 * (time.perf_counter() - begin))
        assert len(data) == RECORD_BYTES
    return took


def sequential(folder: Path) -> float:
    """MB/s of a large record, in reads of 1 MiB."""
    into = bytearray(1 << 20)
    with open(folder / "large", "rb", buffering=0) as file:
        begin, total = time.perf_counter(), 0
        while got := file.readinto(into):
            total += got
    assert total == LARGE_BYTES
    return total / 1e6 / (time.perf_counter() - begin)


def mount(folder: Path, rounds: int) -> None:
    """Each round mounts anew: the kernel keeps nothing of the round before, and the LMDB stays in the page cache."""
    medians: dict[str, list[float]] = {"mount": [], "native": []}
    rates: dict[str, list[float]] = {"mount": [], "native": []}
    for _ in range(rounds):
        with mounted(folder) as at:
            for name, where in (("mount", at), ("native", folder / "plain")):
                medians[name].append(median(opens_us(where)))
                rates[name].append(sequential(where))
    print("| | open + read 128 KiB + close, us | reading 256 MiB, MB/s |\n|---|---|---|")
    for name in medians:
        print(f"| {name} | {_spread(medians[name])} | {_spread(rates[name])} |")


def _spread(values: list[float]) -> str:
    return f"{median(values):.0f} ({min(values):.0f} … {max(values):.0f})"


PARTS: dict[str, Callable[[Path, int], None]] = {"mount": mount}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pario-files-") as folder:
        make(Path(folder))
        PARTS[arguments.part](Path(folder), arguments.rounds)


if __name__ == "__main__":
    main()
