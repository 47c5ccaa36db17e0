"""One job of one rank whose prefetch depth pario's law turns, or nobody, for a given time; one JSON line.

The Loader is an ordinary one. This process puts a recorder between it and its depth: what each read took and when it
ended, and what the law said.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

from benchmarks.worker import Team, run
from pario.tune.depth import Depth
from pario.tune.knobs import Knob, Setting
from pario.tune.tuner import FastProbe, Law, Window


class Recorder(Law):
    """Another law, whose settings are noted."""

    def __init__(self, law: Law) -> None:
        self._law = law
        self.settings: list[tuple[float, int]] = []

    @property
    def hurried(self) -> bool:  # type: ignore[override]
        return self._law.hurried

    @property
    def drains(self) -> bool:  # type: ignore[override]
        return self._law.drains

    def step(self, depth: int, window: Window) -> Setting:
        said = self._law.step(depth, window)
        self.settings.append((time.perf_counter(), said.value))
        return said


class Noting(Depth):
    """A depth that remembers each read.

    ends : (when, seconds of one read, how many, bytes of all)
    """

    def __init__(self, knob: Knob, law: Recorder, day: float) -> None:
        super().__init__(knob, law, day=day)
        self.recorder = law
        self.ends: list[tuple[float, float, int, int]] = []

    def end(self, begin: float, now: float, reads: int, nbytes: int, *, failed: bool = False) -> bool:
        self.ends.append((now, (now - begin) / reads, reads, nbytes))
        return super().end(begin, now, reads, nbytes, failed=failed)


BIN_S = 0.1
MOST = 64


def bins(ends: list[tuple[float, float, int, int]], begin: float, seconds: float) -> list[tuple[int, int, float]]:
    """For every tenth of a second: bytes, reads, and the sum of their seconds."""
    found = [[0.0, 0.0, 0.0] for _ in range(round(seconds / BIN_S))]
    for when, each, reads, nbytes in ends:
        k = math.floor((when - begin) / BIN_S)
        if 0 <= k < len(found):
            found[k] = [found[k][0] + nbytes, found[k][1] + reads, found[k][2] + each * reads]
    return [(int(nbytes), int(reads), round(late, 4)) for nbytes, reads, late in found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--pin", type=int, help="the depth by hand; default: pario's law")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--begin-at", type=float, help="of the monotonic clock; default: now")
    parser.add_argument("--warmup", required=True)
    parser.add_argument("--drop", help="a file whose pages are dropped before each epoch")
    options = parser.parse_args()
    team = Team()

    import pario
    from benchmarks import cache
    from pario.fetch import pool

    # Through the pool of reading threads on every store: what the depth is about.
    choice = pario.Options(inflight=options.pin or (1, MOST), tiers=())
    arguments: dict[str, Any] = {"batch_size": 8, "shuffle": "global", "seed": 1}
    arguments |= {"comm": "self", "recipe": "ring"}

    def loader(path: str) -> Any:
        return pario.Loader(path, decoder=pario.decode.Datum(), options=choice, **arguments)

    with loader(options.warmup) as small:
        for batch in small:
            del batch
    with loader(options.path):  # builds the index, if there is none
        pass
    made: list[Noting] = []

    def depth(knob: Knob, *, day: float) -> Noting:
        made.append(Noting(knob, Recorder(FastProbe()), day))
        return made[-1]

    pool.Depth = depth  # type: ignore[assignment, misc]
    begin = options.begin_at or time.perf_counter()
    late = time.perf_counter() - begin
    if options.begin_at and late > 0:
        raise RuntimeError(f"this job should have begun {late:.1f} s ago: the machine is too busy")
    time.sleep(max(0.0, -late))
    records = 0
    with loader(options.path) as reading:
        while time.perf_counter() < begin + options.seconds:
            if options.drop:
                cache.drop_file(options.drop)
            for batch in reading:
                records += len(batch.ids)
                if time.perf_counter() >= begin + options.seconds:
                    break
    noting = max(made, key=lambda one: len(one.ends))
    team.report(
        {
            "begin": begin,
            "records": records,
            "bins": bins(noting.ends, begin, options.seconds),
            "settings": [(round(when - begin, 4), max(1, min(said, MOST))) for when, said in noting.recorder.settings],
            "pinned": options.pin,
        },
        {"side": "laws", "version": pario.__version__},
    )


if __name__ == "__main__":
    run(main)
