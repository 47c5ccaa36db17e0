"""What every rank of the study's jobs runs: `mpiexec -n 4 python -m pario.study.worker ADDRESS`, started by jobs.py.

Each task is one Loader of one recipe over one data set, a number of epochs long. The clock runs around
`for batch in loader`; what opening cost is told apart. Every recipe delivers into the same batch arrays, through the
same decoder. With "check" the content is hashed, which is for untimed runs.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import time
import traceback
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from pario.comm.world import AnyWorld, get_world
from pario.decode.base import Decoder
from pario.decode.datum import Datum
from pario.decode.raw import Raw
from pario.errors import ParioError
from pario.loader import Loader
from pario.options import Options
from pario.records import Batch
from pario.stats.rank import COUNTED
from pario.study.cache import Unavailable, cached_bytes, drop_file
from pario.study.sets import record_digest

#: World's calls in which all ranks (or all of a node) meet
COLLECTIVES = (
    *("barrier", "node_barrier", "bcast", "node_bcast", "allgather", "exscan", "allreduce_sum", "allreduce_max"),
    *("allreduce_min", "gather_array", "share_array", "shared_bytes", "agree"),
)

#: Steps after which a reader that guesses should know its data: what its counters say from then on is told apart.
SETTLED = 2


def main(address: str) -> None:
    world = get_world(None)
    line = None
    if world.rank == 0:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(address)
        lines = line.makefile("rb")
    while True:
        task = world.bcast(json.loads(lines.readline() or b"null") if line is not None else None)
        if task is None:
            break
        said = world.allgather(_perform(world, task))
        if line is not None:
            line.sendall(json.dumps(said).encode() + b"\n")
    world.free()


def _perform(world: AnyWorld, task: dict[str, Any]) -> dict[str, Any]:
    try:
        return _run(world, task)
    except ParioError as e:
        return {"error": f"{type(e).__name__}: {e}"}
    except Exception:
        traceback.print_exc()
        return {"error": traceback.format_exc(limit=-3)}


def _run(world: AnyWorld, task: dict[str, Any]) -> dict[str, Any]:
    """One Loader; what this rank saw of it. The times are the monotonic clock's, which a machine's processes share."""
    world.barrier()
    began = time.monotonic()
    decoder: Decoder = Datum() if task["decoder"] == "datum" else Raw()
    loader = Loader(
        task["path"],
        task["batch"],
        decoder,
        shuffle=False if task["order"] == "none" else task["order"],
        seed=task["seed"],
        options=Options(**task["options"]),
        recipe=task["recipe"],
        save_index=task["save_index"],
    )
    calls = _count_collectives(loader.world)
    opened = time.monotonic()
    cached = None
    if task["drop"]:  # what opening brought into the page cache, by the kernel's read-ahead above all
        world.barrier()
        if world.rank == 0:
            with suppress(Unavailable):  # a recipe that maps the file holds what it touched; it is told how much
                drop_file(task["drop"])
            cached = cached_bytes(task["drop"])
    epochs: list[dict[str, Any]] = []
    ids: list[np.ndarray] = []
    hashes: list[np.ndarray] = []
    for _ in range(task["epochs"]):
        world.barrier()
        before, counted = _counters(), loader.stats()
        early = counted
        start = time.monotonic()
        first = 0.0
        steps = records = nbytes = 0
        loop = iter(loader)
        met = len(calls)  # all ranks meet at the start of an epoch
        batch = None
        for batch in loop:
            steps += 1
            first = first or time.monotonic()
            records += len(batch.ids)
            nbytes += sum(array.nbytes for array in batch.values())
            if task["check"]:
                ids.append(np.array(batch.ids))
                hashes.append(_digests(batch))
            if steps == SETTLED:
                early = loader.stats()
            if steps == task["steps"]:
                break
        end = time.monotonic()
        batch = None  # its arrays may be used again
        after, counts = _counters(), loader.stats()
        epochs.append(
            {
                "start": start,
                "first": first,
                "end": end,
                "steps": steps,
                "records": records,
                "bytes": nbytes,
                "collectives": len(calls) - met,
                **{name: after[name] - before[name] for name in after},
                "stats": {name: counts[name] - counted[name] for name in COUNTED},
                "stats_late": {name: counts[name] - early[name] for name in COUNTED},
            }
        )
    settings = {name: value for name, value in loader.stats().items() if name not in COUNTED}
    loader.close()
    said: dict[str, Any] = {"began": began, "opened": opened, "cached": cached, "settings": settings, "epochs": epochs}
    if task["check"]:
        said |= _check(world, np.load(task["check"]), ids, hashes)
    return said


def _count_collectives(world: AnyWorld) -> list[str]:
    """The names of the collective calls from now on, as they happen on this rank."""
    calls: list[str] = []

    def counting(name: str) -> Any:
        call = getattr(world, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return call(*arguments, **named)

        return counted

    for name in COLLECTIVES:
        setattr(world, name, counting(name))
    return calls


def _counters() -> dict[str, int]:
    """Of this process so far, all its threads together.

    asked, asked_calls : bytes and calls of reading, from the page cache or a device alike; a page fault is none of them
    device : bytes that storage had to deliver for this process, read-ahead and page faults among them
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "voluntary": usage.ru_nvcsw,
        "involuntary": usage.ru_nivcsw,
        "minor_faults": usage.ru_minflt,
        "major_faults": usage.ru_majflt,
        "user_us": round(usage.ru_utime * 1e6),
        "system_us": round(usage.ru_stime * 1e6),
    }
    try:
        with open("/proc/self/io") as file:
            io = dict(row.split(": ") for row in file.read().splitlines())
    except OSError:  # not everywhere is one allowed to look
        io = {}
    for name, kernel in (("asked", "rchar"), ("asked_calls", "syscr"), ("device", "read_bytes")):
        found[name] = int(io.get(kernel, 0))
    return found


def _digests(batch: Batch) -> np.ndarray:
    """u64[b]: a hash of every record of the batch."""
    data = batch["data"]
    if "offsets" in batch:
        ends = batch["offsets"].tolist()
        found = [record_digest(data[a:b], 0) for a, b in pairwise(ends)]
    else:
        rows = data.reshape(len(data), -1)
        found = [record_digest(row, int(label)) for row, label in zip(rows, batch["label"], strict=True)]
    return np.array(found, np.uint64)


def _check(world: AnyWorld, expected: np.ndarray, ids: list[np.ndarray], hashes: list[np.ndarray]) -> dict[str, int]:
    """On rank 0, of all ranks together: records that are missing, came more than once, or are not what py-lmdb reads.

    expected : u64[n], in key order
    """
    everyones = world.gather_array(np.concatenate([np.empty(0, np.int64), *ids]))
    found = world.gather_array(np.concatenate([np.empty(0, np.uint64), *hashes]))
    if everyones is None or found is None:
        return {}
    times = np.bincount(everyones, minlength=len(expected))
    return {
        "missing": int((times == 0).sum()),
        "repeated": int((times > 1).sum()),
        "wrong": int((found != expected[everyones]).sum()),
    }


if __name__ == "__main__":
    main(sys.argv[1])
