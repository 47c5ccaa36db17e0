"""The codec that an application can afford: equations (1) to (3) of FanStore (Zhang, Huang, Pauloski, Foster,
"Efficient I/O for Neural Network Training with Compressed Data", IPDPS 2020, section VI-B). Pure: all figures come in.

    T_read(C, S) = max(C / R_f, S / R_b)                                                         (3)
    reading and computing take turns:  c is admissible iff  C / D(c) + T_read(C, S) < T_read(C, S')   (1)
    reading goes on while computing:   c is admissible iff  C / D(c) + T_read(C, S) < T_it            (2)
    of the admissible codecs, the one with the highest ratio

C records and S bytes per batch (S' without compression), D(c) records per second that the node decodes, R_f records
and R_b bytes per second that the store delivers at the size in question, T_it seconds per iteration with data in
memory.

Where the paper contradicts itself, the equations decide:

* Its example (SRGAN on GTX, C = 256, S' = 410 MB, ratio 2.1) takes the smaller term of (3) for the compressed read,
  27,035 us; the larger one is 39,291 us. A record may then cost 653 us, not 852. lzsse8 (619 us) passes; lz4hc (858 us)
  does not, and would not with 852 us either, although the text says that both do.
* Its uncompressed read of the same example is 81,064 us by its table and 81,603 us in its text.
* FRNN: 4,957 us, printed as 4,952; V100: 124, printed as 125. Table VII prints "ms" where microseconds are meant:
  brotli with "5.23 ms" per 1.2 KB file would exceed the limit that it is said to keep.

What the equations leave out is a margin: part of the allowance stays free, since the cores that decode also prepare
batches and serve the network, and since a store reads whole blocks. D(c) is measured with all decoding threads at once,
so that they have already shared caches and memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: Part of the allowance that stays free.
MARGIN = 0.1
#: Ratios that differ by less are the same: the codec that decodes faster is taken, and raw before any.
_SAME = 0.01


@dataclass(frozen=True)
class Application:
    """batch : records per batch and node (C)
    nbytes : bytes per batch without compression (S')
    iteration : seconds per iteration with data in memory (T_it)
    threads : of the node, which decode (the paper's example has 4)
    sync : reading and computing take turns, equation (1); else (2)
    """

    batch: int
    nbytes: float
    iteration: float
    threads: int = 1
    sync: bool = False


@dataclass(frozen=True)
class Store:
    """What the store delivers at one size of its reads. records : per second (R_f); nbytes : per second (R_b)"""

    records: float
    nbytes: float


@dataclass(frozen=True)
class Candidate:
    """name : of the codec, as `registry.parse` reads it
    ratio : raw bytes / stored bytes, headers included
    seconds : of one thread per record, while the others decode, too
    store : at the compressed size; None: as at the raw size
    dictionary : whether it was measured with a trained dictionary
    stored : bytes of a record in the file, with what pages leave free; 0: not known
    """

    name: str
    ratio: float
    seconds: float
    store: Store | None = None
    dictionary: bool = False
    stored: float = 0.0

    def __str__(self) -> str:
        return self.name + (" + dictionary" if self.dictionary else "")


@dataclass(frozen=True)
class Verdict:
    """limit : seconds that one thread may spend on a record, without the margin; negative: the read alone takes longer
    step : predicted seconds of an iteration, reading and decoding included
    slower : predicted step / step of the uncompressed data in memory (async) or in the store (sync) - 1
    """

    candidate: Candidate
    limit: float
    admissible: bool
    step: float
    slower: float

    @property
    def room(self) -> float:
        """Times that decoding could take longer than it does, minus 1; negative: it takes too long."""
        return self.limit / self.candidate.seconds - 1 if self.candidate.seconds else math.inf


@dataclass(frozen=True)
class Selection:
    """verdicts : from the lowest ratio to the highest
    chosen : admissible with the highest ratio; if none is, the one with the shortest step
    runner_up : the admissible one with the next lower ratio; None if there is none
    tighter : the next one with a higher ratio than the chosen, which is not admissible; None if there is none
    speed : the fastest admissible one was asked for
    """

    application: Application
    verdicts: tuple[Verdict, ...]
    chosen: Verdict
    runner_up: Verdict | None
    tighter: Verdict | None
    speed: bool = False

    def prediction(self) -> dict[str, Any]:
        """For the reserved entry of a packed database: `Loader.report()` says whether it held."""
        mine = self.chosen.candidate
        return {
            "codec": mine.name,
            "for": "speed" if self.speed else "capacity",
            "dictionary": mine.dictionary,
            "ratio": round(mine.ratio, 4),
            "decode_seconds": mine.seconds,
            "limit_seconds": self.chosen.limit,
            "admissible": self.chosen.admissible,
            "application": asdict(self.application),
            "records_per_second": self.application.batch / self.chosen.step if self.chosen.step else None,
        }


def read_seconds(batch: float, nbytes: float, store: Store) -> float:
    """Equation (3)."""
    return max(batch / store.records, nbytes / store.nbytes)


def limit(application: Application, ratio: float, raw: Store, packed: Store | None = None) -> float:
    """Seconds that one thread may spend on decoding a record.

    raw, packed : what the store delivers at the raw and at the compressed size
    """
    whole = read_seconds(application.batch, application.nbytes, raw) if application.sync else application.iteration
    slack = whole - read_seconds(application.batch, application.nbytes / ratio, packed or raw)
    return slack / application.batch * application.threads


def select(
    application: Application, candidates: Sequence[Candidate], raw: Store, margin: float = MARGIN, speed: bool = False
) -> Selection:
    """Judge all candidates. "raw" should be among them: it is what remains where nothing else is admissible.

    raw : what the store delivers at the raw size
    speed : take the admissible one that reads and decodes in the least time, not the one with the highest ratio
    """
    verdicts = sorted(
        (_judged(application, one, raw, margin) for one in candidates),
        key=lambda verdict: (verdict.candidate.ratio, -verdict.candidate.seconds),
    )
    good = [verdict for verdict in verdicts if verdict.admissible]
    quickest = min(verdict.step for verdict in verdicts)
    chosen = _best(good or [verdict for verdict in verdicts if verdict.step <= quickest * (1 + _SAME)])
    if speed and good:
        chosen = max(good, key=lambda verdict: verdict.limit - verdict.candidate.seconds)
    lower = [verdict for verdict in good if verdict.candidate.ratio < chosen.candidate.ratio * (1 - _SAME)]
    bound = chosen.candidate.ratio * (1 + _SAME)
    higher = [verdict for verdict in verdicts if not verdict.admissible and verdict.candidate.ratio > bound]
    runner_up, tighter = _best(lower) if lower and good else None, higher[0] if higher else None
    return Selection(application, tuple(verdicts), chosen, runner_up, tighter, speed)


def _best(good: Sequence[Verdict]) -> Verdict:
    highest = max(verdict.candidate.ratio for verdict in good)
    near = [verdict for verdict in good if verdict.candidate.ratio >= highest * (1 - _SAME)]
    return min(near, key=lambda verdict: (verdict.candidate.name != "raw", verdict.candidate.seconds))


def _judged(application: Application, one: Candidate, raw: Store, margin: float) -> Verdict:
    allowed = limit(application, one.ratio, raw, one.store)
    reading = read_seconds(application.batch, application.nbytes / one.ratio, one.store or raw)
    loading = application.batch * one.seconds / application.threads + reading
    if application.sync:
        before = application.iteration + read_seconds(application.batch, application.nbytes, raw)
        step = application.iteration + loading
        # Without compression nothing changes.
        admissible = one.seconds <= allowed * (1 - margin) or one.name == "raw"
    else:
        before, step = application.iteration, max(application.iteration, loading)
        admissible = one.seconds < allowed * (1 - margin)
    return Verdict(one, allowed, admissible, step, step / before - 1 if before else 0.0)
