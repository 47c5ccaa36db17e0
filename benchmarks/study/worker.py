"""The program of every rank of the study's jobs: jobs.py starts `mpiexec -n 4 python -m benchmarks.study.worker
ADDRESS`.

Each task is one Loader of one recipe over one data set, or one loop written by hand, for a number of epochs. The clock
runs around `for batch in loader`; the time of opening is reported apart. Every recipe delivers into the same batch
arrays, through the same decoder. With "check" the content is hashed, in untimed runs only.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.cache import Unavailable, cached_bytes, drop_file
from benchmarks.study.by_hand import HandLoop
from benchmarks.study.sets import record_digest
from pario.comm.base import AnyWorld
from pario.comm.world import get_world
from pario.decode.base import Decoder
from pario.decode.datum import Datum
from pario.decode.raw import Raw
from pario.errors import ParioError
from pario.loader.loader import Loader
from pario.options import Options, Recipe, find_recipe
from pario.records import Batch
from pario.stats.rank import COUNTED

#: World's collective calls, over all ranks or over a node
COLLECTIVES = (
    *("barrier", "node_barrier", "bcast", "node_bcast", "allgather", "exscan", "allreduce_sum", "allreduce_max"),
    *("allreduce_min", "gather_array", "share_array", "shared_bytes", "agree"),
)

#: Steps after which a guessing reader should know its data: its counters from then on are reported separately.
SETTLED = 2


def main(address: str) -> None:
    world = get_world(None)
    line = None
    if world.rank == 0:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(address)
        lines = line.makefile("rb")
        line.sendall(b'{"rank": 0}\n')
    while True:
        task = world.bcast(json.loads(lines.readline() or b"null") if line is not None else None)
        if task is None:
            break
        said = world.allgather(_perform(world, task))
        if line is not None:
            line.sendall(json.dumps(said).encode() + b"\n")
    world.close()


def _perform(world: AnyWorld, task: dict[str, Any]) -> dict[str, Any]:
    try:
        return _run(world, task)
    except ParioError as e:
        return {"error": f"{type(e).__name__}: {e}"}
    except Exception:
        traceback.print_exc()
        return {"error": traceback.format_exc(limit=-3)}


def _recipe(name: str, stagger: int | None) -> Recipe:
    """stagger : readers at once, overriding the recipe"""
    recipe = find_recipe(name)
    return recipe if stagger is None else replace(recipe, stagger=stagger)


def _run(world: AnyWorld, task: dict[str, Any]) -> dict[str, Any]:
    """Run one loader; returns this rank's observations. Times are of the monotonic clock, which all processes share."""
    world.barrier()
    began = time.monotonic()
    loader = HandLoop(world, task) if task["loop"] else _loader(task)
    calls = [] if task["loop"] else _count_collectives(loader.world)
    opened = time.monotonic()
    cached = None
    if task["drop"]:  # pages that opening brought into the page cache, mostly by the kernel's read-ahead
        world.barrier()
        if world.rank == 0:
            with suppress(Unavailable):  # a recipe that maps the file keeps the pages it touched; `cached` counts them
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
        batch = None  # so that its arrays can be reused
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


def _loader(task: dict[str, Any]) -> Loader:
    decoder: Decoder = Datum() if task["decoder"] == "datum" else Raw()
    given = {name: value for name, value in task["options"].items() if name != "stagger"}
    return Loader(
        task["path"],
        task["batch"],
        decoder,
        shuffle=False if task["order"] == "none" else task["order"],
        seed=task["seed"],
        # The recipes are ways of reading the store; "auto" is what people get who set nothing.
        options=Options(**({} if task["recipe"] == "auto" else {"tiers": (), "once": True}) | given),
        recipe=_recipe(task["recipe"], task["options"].get("stagger")),
        save_index=task["save_index"],
    )


def _count_collectives(world: AnyWorld) -> list[str]:
    """A list to which this rank's collective calls append their names from now on."""
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
    """Counters of this process so far, over all its threads.

    asked, asked_calls : bytes and calls of read system calls, from the page cache or a device; page faults do not count
    device : bytes that storage delivered for this process, including read-ahead and page faults
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
    except OSError:  # not readable everywhere
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
    """On rank 0, for all ranks together: records that are missing, repeated, or different from what py-lmdb reads.

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
