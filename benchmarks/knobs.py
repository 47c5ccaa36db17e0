"""The knobs: what they settle on, and what they cost.

    python -m benchmarks.knobs --data DIR [--parts consumer,cost]

consumer   197 KB records in "global" order from the store of 20 ms and 200 MB/s, one rank, a step that takes so many
           milliseconds per sample: reads in flight at the end, and seconds that the step waited
cost       processor time of everything that measures and turns knobs, as a share of a core: this process's own clock
           around each of those calls, less what the clock takes, on that store and out of the page cache

Needs root, fuse3 and mfusepy.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pario
from benchmarks import data
from benchmarks.measure import parser_of
from benchmarks.stores.latency import latency_store
from pario.feed.decode_step import DecodeStep
from pario.feed.ring_writer import RingWriter
from pario.tune.depth import Depth

#: seconds of a read, bytes/s of all
STORE = 0.020, 200e6
#: of each run
SECONDS = 30.0
STEPS_MS = (40.0, 12.0, 2.0, 0.0)
BATCH = 8
#: everything that runs for the knobs alone
CALLS = {
    RingWriter: ("is_full",),
    Depth: ("begin", "end", "note_full"),
    DecodeStep: ("taken",),
}


def steps(path: str, ms: float, seconds: float, shuffle: str = "global", decoder: Any = None) -> dict[str, Any]:
    """Epochs for so long, with a step of so many milliseconds per sample; what the knobs were at the end."""
    options = pario.Options(tiers=())
    with pario.Loader(path, BATCH, decoder, shuffle=shuffle, recipe="ring", options=options) as loader:
        begin, cpu = time.perf_counter(), time.process_time()
        wait_at_half = 0.0
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            if ms:
                time.sleep(ms * len(batch.ids) / 1e3)
            now = time.perf_counter() - begin
            if now < seconds / 2:
                wait_at_half = loader.stats()["waiting"]
            if now > seconds:
                break
        found = loader.stats()
        return {
            "rate": found["node_bytes"] / (time.perf_counter() - begin),
            "cpu": (time.process_time() - cpu) / (time.perf_counter() - begin),
            "waited": (found["waiting"] - wait_at_half) / (seconds / 2),
            "depth": found["depth"],
            "seconds": time.perf_counter() - begin,
        }


def consumer(held: data.DataSet, seconds: float) -> None:
    read_s, bytes_per_s = STORE
    with latency_store(held.path, read_s=read_s, bytes_per_s=bytes_per_s) as store:
        for ms in STEPS_MS:
            one = steps(store.folder, ms, seconds)
            print(
                f"consumer {ms:4.0f} ms: depth {one['depth']:2d}, the step "
                f"waited {one['waited']:.1%} of the second half, {one['rate'] / 1e6:.0f} MB/s",
                flush=True,
            )


class Clock:
    """Processor seconds inside the outermost of some calls, of all threads."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0
        self.itself = 0.0  # seconds that a call of the clock takes
        self._inside: dict[int, bool] = {}

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **more: Any) -> Any:
            me = threading.get_ident()
            if self._inside.get(me):
                return call(*arguments, **more)
            self._inside[me] = True
            begin = time.thread_time()
            try:
                return call(*arguments, **more)
            finally:
                self.seconds += time.thread_time() - begin
                self.calls += 1
                self._inside[me] = False

        return timed


def cost(held: data.DataSet, seconds: float) -> None:
    clock, empty = Clock(), Clock()
    nothing = empty.around(lambda: None)
    for _ in range(10_000):
        nothing()
    clock.itself = empty.seconds / empty.calls
    kept = [(owner, name, getattr(owner, name)) for owner, names in CALLS.items() for name in names]
    for owner, name, call in kept:
        setattr(owner, name, clock.around(call))
    try:
        cells: list[tuple[str, float, Any]] = [
            ("20 ms, 200 MB/s, no step", 0.0, None),
            ("20 ms, 200 MB/s, 40 ms per sample", 40.0, None),
            ("20 ms, 200 MB/s, 2 ms, a decoder of threads", 2.0, len),
        ]
        read_s, bytes_per_s = STORE
        with latency_store(held.path, read_s=read_s, bytes_per_s=bytes_per_s) as store:
            for name, ms, decoder in cells:
                _cost(clock, name, partial(steps, store.folder, ms, seconds, decoder=decoder))
        _cost(clock, "page cache, through the ring, no step", partial(steps, held.path, 0.0, seconds, "block"))
    finally:
        for owner, name, call in kept:
            setattr(owner, name, call)


def _cost(clock: Clock, name: str, run: Callable[[], dict[str, Any]]) -> None:
    before, calls = clock.seconds, clock.calls
    one = run()
    many = clock.calls - calls
    spent = clock.seconds - before - many * clock.itself
    print(
        f"cost {name}: {spent / one['seconds']:.2%} of a core, {many / one['seconds']:,.0f} calls/s of "
        f"{spent / max(1, many) * 1e6:.1f} us, of a process that uses {one['cpu']:.0%}; {one['rate'] / 1e6:,.0f} MB/s",
        flush=True,
    )


def main() -> int:
    parser = parser_of("knobs", __doc__, 1)
    parser.add_argument("--parts", default="consumer,cost")
    options = parser.parse_args()
    held = data.make(options.data, "197k", 1000)
    pario.Reader(held.path, comm="self").close()  # saves the index
    seconds = 2.0 if options.smoke else SECONDS
    parts = options.parts.split(",")
    if "consumer" in parts:
        consumer(held, seconds)
    if "cost" in parts:
        cost(held, seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
