"""What the device itself gives: fio, past the page cache, in long reads in order and in reads of one item's size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

from pario.bench.cache import Unavailable

__all__ = ["Ceiling", "measure_ceiling"]

_LONG = 4 << 20
_BLOCK = 4096
#: reads in flight: of long ones, of those of an item's size
_JOBS_LONG, _JOBS = 8, 64


class Ceiling(NamedTuple):
    """Bytes per second.

    sequential : long reads, each job through a stretch of its own
    at_size : reads of `read_bytes`, at random
    """

    sequential: float
    at_size: float
    read_bytes: int


def measure_ceiling(files: Sequence[str], read_bytes: float, seconds: float) -> Ceiling:
    """Read the files with fio, without writing to them. Raises Unavailable if fio is not there, or cannot.

    files : one, which is divided among the reads in flight, or several, each read again and again
    read_bytes : of one item; rounded up to whole blocks
    seconds : each of the two measurements may take
    """
    fio = shutil.which("fio")
    if fio is None:
        raise Unavailable("fio is not installed (Debian: apt-get install fio)")
    least = min(os.path.getsize(file) for file in files) // _BLOCK * _BLOCK
    if not least:
        raise Unavailable(f"the files are too small for fio: less than {_BLOCK} bytes")
    block = min(-(-int(read_bytes) // _BLOCK) * _BLOCK, least)
    if len(files) > 1:
        long = _run(fio, [("--rw=read", f"--bs={min(_LONG, least)}", f"--size={least}")], files, seconds)
        return Ceiling(long, _run(fio, [("--rw=randread", f"--bs={block}")], files, seconds), block)
    jobs = max(1, min(_JOBS_LONG, least // _LONG))
    stretch = least // jobs // _BLOCK * _BLOCK
    parts = [
        ("--rw=read", f"--bs={min(_LONG, stretch)}", f"--size={stretch}", f"--offset={k * stretch}")
        for k in range(jobs)
    ]
    jobs = max(1, min(_JOBS, least // block))
    return Ceiling(
        _run(fio, parts, list(files) * len(parts), seconds),
        _run(fio, [("--rw=randread", f"--bs={block}", "--norandommap")] * jobs, list(files) * jobs, seconds),
        block,
    )


def _run(fio: str, how: Sequence[tuple[str, ...]], files: Sequence[str], seconds: float) -> float:
    """Bytes per second of jobs that read these files at once. how : of each, or of all"""
    command = [
        fio, "--readonly", "--thread", "--ioengine=psync", "--direct=1", "--group_reporting", "--time_based",
        f"--runtime={max(1, round(seconds))}", "--output-format=json",
    ]  # fmt: skip
    for number, file in enumerate(files):
        name = file.replace("\\", "\\\\").replace(":", "\\:")
        command += [f"--name=job{number}", f"--filename={name}", *how[number % len(how)]]
    before = [_state(file) for file in files]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60 + 10 * seconds, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise Unavailable("fio did not end in time") from None
    if [_state(file) for file in files] != before:
        raise RuntimeError("fio changed the files, or somebody else did: its figures are worthless")
    if done.returncode != 0 or "{" not in done.stdout:
        raise Unavailable(f"fio failed: {(done.stderr or done.stdout).strip()[:300]}")
    jobs: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    nbytes = sum(job["read"]["io_bytes"] for job in jobs)
    return float(nbytes) / max(max(job["read"]["runtime"] for job in jobs) / 1000, 1e-3)


def _state(file: str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns
