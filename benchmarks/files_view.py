"""What a view costs: opening, listing, paths outside, importing numpy, reading after open, idling.

    python -m benchmarks.files_view [--rounds 5] [--json FILE]

The same program runs natively, under `pario files view`, and on two mounts, in turns; a figure is the median of the
rounds, with their range. Every round mounts anew. "mount" is `pario files mount`, whose names and bytes stay in the
kernel's cache; "FUSE by default" is the same one with the settings of the FUSE library, where opening a file asks the
server, and empties the cache of its bytes. Records have 128 KiB. "held": the file was opened before and is still in
memory; "new": it was not, so that its pages are allocated, which costs the kernel more than all else. "small": files of
3,000 bytes, all of them new, by one process and by four at once; 50,000 of them are the folder that is listed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb

RECORD_BYTES, RECORDS, LARGE_BYTES = 128 << 10, 1500, 256 << 20
SMALL_BYTES, SMALL_RECORDS = 3000, 50_000

PROGRAM = """
import json, os, sys, time
folder = sys.argv[1]
clock = time.perf_counter
room = bytearray(131072)
def once(path):
    fd = os.open(path, os.O_RDONLY); n = os.readv(fd, [room]); os.close(fd)
    assert n == 131072
def per_call_us(call, arguments):
    begin = clock()
    for each in arguments:
        call(each)
    return (clock() - begin) / len(arguments) * 1e6
paths = [f"{folder}/r/{k:06d}" for k in range(1500)]
found = {"outside_us": per_call_us(os.stat, ["/usr/bin/env"] * 2000)}
found["new_us"] = per_call_us(once, paths)
found["held_us"] = per_call_us(once, paths[-200:] * 5)
found["stat_us"] = per_call_us(os.stat, paths[-200:] * 5)
fd = os.open(f"{folder}/large", os.O_RDONLY)
os.readv(fd, [room])
rates = []
large = bytearray(1 << 20)
for _ in range(3):
    os.lseek(fd, 0, os.SEEK_SET)
    begin = clock()
    while n := os.readv(fd, [large]):
        pass
    rates.append((256 << 20) / (clock() - begin) / 1e9)
found["read_GBps"] = max(rates)
begin = clock()
import numpy
found["import_ms"] = (clock() - begin) * 1e3
def list_s():
    begin = clock()
    with os.scandir(f"{folder}/small") as names:
        assert sum(1 for _ in names) == 50000
    return clock() - begin
found["first_list_ms"] = list_s() * 1e3
found["names_per_s"] = 50000 / min(list_s() for _ in range(3))
def small(k):
    fd = os.open(f"{folder}/small/{k:06d}", os.O_RDONLY); n = os.readv(fd, [room]); os.close(fd)
    assert n == 3000
found["small_us"] = per_call_us(small, range(2000))
begin = clock()
for rank in range(4):
    if not os.fork():
        per_call_us(small, range(5000 + 2000 * rank, 7000 + 2000 * rank))
        os._exit(0)
assert not any(os.wait()[1] for _ in range(4))
found["small_4_us"] = (clock() - begin) / 2000 * 1e6
print(json.dumps(found))
"""


def make(top: Path) -> None:
    with lmdb.open(str(top / "set.lmdb"), map_size=2 << 30) as env, env.begin(write=True) as txn:
        for k in range(RECORDS):
            txn.put(b"r/%06d" % k, os.urandom(RECORD_BYTES))
        txn.put(b"large", bytes(LARGE_BYTES))
        for k in range(SMALL_RECORDS):
            txn.put(b"small/%06d" % k, bytes(SMALL_BYTES))
    real = top / "real" / "r"
    real.mkdir(parents=True)
    for k in range(RECORDS):
        (real / f"{k:06d}").write_bytes(os.urandom(RECORD_BYTES))
    (top / "real" / "small").mkdir()
    for k in range(SMALL_RECORDS):
        (top / "real" / "small" / f"{k:06d}").write_bytes(bytes(SMALL_BYTES))
    (top / "real" / "large").write_bytes(bytes(LARGE_BYTES))


def run(before: list[str], folder: Path) -> dict[str, float]:
    words = [*before, sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


BY_DEFAULT = """
import sys, mfusepy
from pario.commands.files import mount
from pario.files import fuse
made = mfusepy.FUSE
kept = ("kernel_cache", "entry_timeout", "attr_timeout", "negative_timeout")
mfusepy.FUSE = lambda *words, **more: made(*words, **{k: v for k, v in more.items() if k not in kept})
fuse._Operations.open = lambda self, path, flags: 0
mount.callback((sys.argv[1],), sys.argv[2], False, False)
"""


@contextlib.contextmanager
def mounted(top: Path, *start: str) -> Iterator[Path | None]:
    """The same records through FUSE; None where there is no such mount. start : what comes before LMDB and folder"""
    where = top / "mount"
    where.mkdir(exist_ok=True)
    words = [sys.executable, *start, f"{top}/set.lmdb", str(where)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        end = time.monotonic() + 20
        while not os.path.ismount(where) and server.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        try:
            yield where if os.path.ismount(where) else None
        finally:
            server.terminate()
            if os.path.ismount(where):
                subprocess.run(["fusermount3", "-u", str(where)], capture_output=True)


def idle_share(view: list[str]) -> float:
    """Processor time of a supervisor whose program sleeps, as a share of a core."""
    with subprocess.Popen([*view, "sleep", "6"]) as front:
        time.sleep(2)
        (supervisor,) = Path(f"/proc/{front.pid}/task/{front.pid}/children").read_text().split()

        def used() -> float:
            fields = Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        begin, before = time.monotonic(), used()
        time.sleep(3)
        return (used() - before) / (time.monotonic() - begin)


def measure(rounds: int) -> dict[str, Any]:
    # Real files and the LMDB's pages on a memory file system, so that no disk is measured.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as top_name:
        top = Path(top_name)
        make(top)
        view = [sys.executable, "-m", "pario", "files", "view", "--held", "600MiB", f"{top}/set.lmdb={top}/view", "--"]
        runs: dict[str, list[dict[str, float]]] = {"native": [], "view": []}
        for _ in range(rounds):
            runs["native"].append(run([], top / "real"))
            runs["view"].append(run(view, top / "view"))
            for name, start in (("mount", ("-m", "pario", "files", "mount")), ("FUSE by default", ("-c", BY_DEFAULT))):
                with mounted(top, *start) as mount:
                    if mount is not None:
                        runs.setdefault(name, []).append(run([], mount))
        found: dict[str, Any] = {
            side: {name: statistics.median(each[name] for each in all_) for name in all_[0]}
            for side, all_ in runs.items()
        }
        found["ranges"] = {
            side: {name: [f(each[name] for each in all_) for f in (min, max)] for name in all_[0]}
            for side, all_ in runs.items()
        }
        native, viewed = found["native"], found["view"]
        found["reading / native"] = viewed["read_GBps"] / native["read_GBps"]
        found["importing numpy / native"] = viewed["import_ms"] / native["import_ms"]
        for side in ("mount", "FUSE by default"):
            for name in ("held_us", "new_us") if side in found else ():
                found[f"{side} / view, {name}"] = found[side][name] / viewed[name]
        found["idle share of a core"] = idle_share(view)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given.rounds)
    print(json.dumps(found, indent=2))
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
