"""One job of one rank whose prefetch depth a given law turns, for a given time; one JSON line, and a trace.

The Loader is an ordinary one. This process puts a recorder between it and its depth: what each read took and when it
ended, each window and what the law said to it (benchmarks/laws.py).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.laws import LAWS, Held, Prisma, line, told
from benchmarks.worker import Team, run
from pario.tune.depth import Depth
from pario.tune.knobs import Knob, Setting
from pario.tune.tuner import Law, Window


class Buffer:
    """What PRISMA's rule looks at: how much of the ring is reserved or waits for the consumer."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._samples: list[float] = []
        self.begun = self.taken = 0.0

    def look(self) -> None:
        self._samples.append(min(100.0, 100.0 * max(0.0, self.begun - self.taken) / self._nbytes))

    def window(self, window: Window) -> Held:
        samples, self._samples = self._samples, []
        numbers = {name: getattr(window, name) for name in Window.__dataclass_fields__}
        mean = statistics.fmean(samples) if samples else 0.0
        deviation = statistics.pstdev(samples) if samples else 0.0
        return Held(**numbers, samples=len(samples), held=mean, deviation=deviation)


class Recorder(Law):
    """Another law, whose windows are noted."""

    def __init__(self, law: Law, buffer: Buffer) -> None:
        self._law, self._buffer = law, buffer
        self.trace: list[str] = []
        self.settings: list[tuple[float, int]] = []

    @property
    def hurried(self) -> bool:  # type: ignore[override]
        return self._law.hurried

    @property
    def drains(self) -> bool:  # type: ignore[override]
        return self._law.drains

    def step(self, depth: int, window: Window) -> Setting:
        seen = told(self._buffer.window(window) if isinstance(self._law, Prisma) else window)
        said = self._law.step(depth, seen)
        now = time.perf_counter()
        self.trace.append(line(now - STARTED, depth, seen, said))
        self.settings.append((now, said.value))
        return said


class Noting(Depth):
    """A depth that remembers each read.

    ends : (when, seconds of one read, how many, bytes of all)
    """

    def __init__(self, knob: Knob, law: Law, buffer: Buffer, day: float) -> None:
        super().__init__(knob, law, day=day)
        self._buffer = buffer
        self.ends: list[tuple[float, float, int, int]] = []
        self._mean = 0.0

    def begin(self, now: float, in_flight: int) -> None:
        self._buffer.begun += self._mean
        self._buffer.look()
        super().begin(now, in_flight)

    def end(self, begin: float, now: float, reads: int, nbytes: int, *, failed: bool = False) -> bool:
        self.ends.append((now, (now - begin) / reads, reads, nbytes))
        self._buffer.begun += nbytes - self._mean  # it was a guess when it began
        self._mean = nbytes / reads
        return super().end(begin, now, reads, nbytes, failed=failed)


STARTED = time.perf_counter()
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
    parser.add_argument("--law", choices=[*LAWS, "by hand"], required=True)
    parser.add_argument("--pin", type=int, help="the depth by hand")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--begin-at", type=float, help="of the monotonic clock; default: now")
    parser.add_argument("--warmup", required=True)
    parser.add_argument("--drop", help="a file whose pages are dropped before each epoch")
    parser.add_argument("--trace", help="a file for it")
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
    buffer = Buffer(choice.slots * choice.slot_bytes)
    made: list[Noting] = []

    def depth(knob: Knob, *, day: float) -> Noting:
        law = LAWS[options.law]() if options.law in LAWS else LAWS["FAST + probe"]()
        made.append(Noting(knob, Recorder(law, buffer), buffer, day))
        return made[-1]

    pool.Depth = depth  # type: ignore[assignment, misc]
    global STARTED
    STARTED = begin = options.begin_at or time.perf_counter()
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
                buffer.taken += batch["data"].nbytes
                buffer.look()
                if time.perf_counter() >= begin + options.seconds:
                    break
    noting = max(made, key=lambda one: len(one.ends))
    recorder = noting._law
    assert isinstance(recorder, Recorder)
    if options.trace:
        Path(options.trace).write_text("".join(f"{text}\n" for text in recorder.trace))
    team.report(
        {
            "begin": begin,
            "records": records,
            "bins": bins(noting.ends, begin, options.seconds),
            "settings": [(round(when - begin, 4), max(1, min(said, MOST))) for when, said in recorder.settings],
            "pinned": options.pin,
        },
        {"side": "laws", "version": pario.__version__},
    )


if __name__ == "__main__":
    run(main)
